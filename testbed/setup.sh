#!/usr/bin/env bash
# Installs what the testbed needs and this machine lacks: Debian packages (as root), Kafka's jars and Prometheus (as anyone).
# Exit code 2 and one line when something is missing that only root may install.
set -euo pipefail
cd "$(dirname "$0")"

cache=${XDG_CACHE_HOME:-$HOME/.cache}/fairpost
libs=$cache/kafka-4.3.1
prometheus=$cache/prometheus
made=()
trap '[ ${#made[@]} -eq 0 ] || rm -rf "${made[@]}"' EXIT

missing=()
for module in ensurepip venv; do
  python3 -c "import $module" 2>/dev/null || { missing+=(python3-venv); break; }
done
[ -x /usr/sbin/postfix ] || missing+=(postfix)
[ -x /usr/sbin/opendkim ] || missing+=(opendkim)
[ -x /usr/sbin/opendkim-genkey ] || missing+=(opendkim-tools)
# pg_stat_statements lies in Debian's server package; another build may lack it.
compgen -G '/usr/lib/postgresql/*/lib/pg_stat_statements.so' >/dev/null || missing+=(postgresql)
command -v java >/dev/null || missing+=(openjdk-17-jre-headless)
# The units are held against systemd's own judgement.
command -v systemd-analyze >/dev/null || missing+=(systemd)
command -v openssl >/dev/null || missing+=(openssl)
# Fluentd's regexps are tried in Ruby's own engine.
command -v ruby >/dev/null || missing+=(ruby)
[ -d "$libs" ] || command -v mvn >/dev/null || missing+=(maven)

if [ ${#missing[@]} -gt 0 ]; then
  if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
    echo "testbed: missing: ${missing[*]}; run as root: apt-get install --no-install-recommends ${missing[*]}" >&2
    exit 2
  fi
  echo "testbed: installing ${missing[*]}" >&2
  # Only the binaries are wanted: no PostgreSQL cluster is made, no Postfix configured, and no daemon started.
  no_cluster=/etc/postgresql-common/createcluster.d/fairpost-testbed.conf
  no_start=/usr/sbin/policy-rc.d
  mkdir -p "${no_cluster%/*}"
  made+=("$no_cluster")
  echo 'create_main_cluster = false' >"$no_cluster"
  if [ ! -e "$no_start" ]; then
    made+=("$no_start")
    printf '#!/bin/sh\nexit 101\n' >"$no_start"
    chmod +x "$no_start"
  fi
  export DEBIAN_FRONTEND=noninteractive
  apt-get -qq update
  if [[ " ${missing[*]} " == *" postfix "* ]]; then
    command -v debconf-set-selections >/dev/null || apt-get -qq install -y debconf >/dev/null
    echo 'postfix postfix/main_mailer_type select No configuration' | debconf-set-selections
  fi
  apt-get -qq install -y --no-install-recommends "${missing[@]}" >/dev/null
  # Nor is it to start with the machine.
  if [[ " ${missing[*]} " == *" opendkim "* ]] && command -v systemctl >/dev/null; then
    systemctl --quiet disable opendkim.service >&2
  fi
fi

if [ ! -d "$libs" ]; then
  echo "testbed: fetching Apache Kafka 4.3.1 into $libs" >&2
  mkdir -p "$cache"
  fresh=$(mktemp -d "$libs.XXXXXX")
  made+=("$fresh")
  mvn -q -B -f kafka/pom.xml dependency:copy-dependencies -DoutputDirectory="$fresh" >&2
  chmod -R u=rwX,go=rX "$fresh"
  # Renamed when complete, so that a folder of this name always holds all jars.
  mv -T "$fresh" "$libs" 2>/dev/null || [ -d "$libs" ]
fi

if [ ! -d "$prometheus" ] && ! command -v promtool >/dev/null; then
  if ! command -v apt-get >/dev/null; then
    echo "testbed: missing: prometheus and promtool; put them on PATH" >&2
    exit 2
  fi
  echo "testbed: fetching Prometheus into $prometheus" >&2
  mkdir -p "$cache"
  fresh=$(mktemp -d "$prometheus.XXXXXX")
  made+=("$fresh")
  [ "$(id -u)" -ne 0 ] || apt-get -qq update
  # The package would start a server on this machine: only its programs are taken out of it.
  (
    cd "$fresh" && apt-get -qq -o APT::Sandbox::User=root download prometheus &&
      dpkg-deb --fsys-tarfile prometheus_*.deb | tar -x --strip-components=3 ./usr/bin/prometheus ./usr/bin/promtool &&
      rm prometheus_*.deb
  ) || { echo "testbed: missing: prometheus and promtool; put them on PATH" >&2; exit 2; }
  chmod 755 "$fresh"
  mv -T "$fresh" "$prometheus" 2>/dev/null || [ -d "$prometheus" ]
fi
