"""The sidecar of one Postfix: claims chunks by fair share, paces them and hands them over."""
