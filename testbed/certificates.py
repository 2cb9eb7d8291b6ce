"""Certificates for services on loopback, made by openssl: an authority of a test's own, and what it signs."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

from testbed.ports import LOOPBACK
from testbed.processes import ServiceError, find_program

if TYPE_CHECKING:
    from pathlib import Path

KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


class Authority:
    """A certificate authority that nobody trusts who is not told to.

    Args:
        directory: where its files and those that it signs are; made when missing.
    """

    def __init__(self, directory: Path) -> None:
        self.certificate = directory / "ca.pem"
        self._directory = directory
        self._key = directory / "ca.key"
        directory.mkdir(parents=True, exist_ok=True)
        sign_itself("testbed authority", self.certificate, self._key)

    def sign(self, name: str, *, days: int = 2) -> tuple[Path, Path]:
        """Make a key and a certificate for a name, good on loopback; returns the certificate's file and the key's.

        Args:
            name: the subject's common name, and that of the files.
            days: how long it is good; negative: until so long ago.
        """
        certificate, key = self._directory / f"{name}.pem", self._directory / f"{name}.key"
        request = self._directory / f"{name}.csr"
        _openssl(
            *("req", "-new", *KEY, "-keyout", key, "-out", request, "-subj", f"/CN={name}"),
            *("-addext", f"subjectAltName=IP:{LOOPBACK},DNS:localhost"),
        )
        _openssl(
            *("x509", "-req", "-in", request, "-CA", self.certificate, "-CAkey", self._key),
            *("-copy_extensions", "copyall", "-days", str(days), "-out", certificate),
        )
        return certificate, key


def sign_itself(name: str, certificate: Path, key: Path) -> None:
    """Make a key and a certificate for a name that the key itself has signed, in two files or in one."""
    _openssl(
        *("req", "-x509", *KEY, "-keyout", key, "-out", certificate),
        *("-subj", f"/CN={name}", "-days", "2"),
    )


def _openssl(*arguments: str | Path) -> None:
    done = subprocess.run(
        [find_program("openssl"), *arguments], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise ServiceError(f"openssl {arguments[0]}: {done.stderr.strip()}")
