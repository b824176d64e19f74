"""Certificates for tests, made with openssl."""

import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import pytest

KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


class Files(NamedTuple):
    """What one process needs."""

    ca: Path
    certificate: Path
    key: Path


class Authority:
    """Signs certificates for a day."""

    def __init__(self, directory: Path) -> None:
        if shutil.which("openssl") is None:
            pytest.skip("needs openssl")
        self.certificate = directory / "ca.pem"
        self._key = directory / "ca.key"
        extension = ("-addext", "keyUsage=critical,keyCertSign,cRLSign")
        files = ("-keyout", str(self._key), "-out", str(self.certificate))
        _openssl("req", "-x509", *KEY, "-days", "1", "-subj", "/CN=test authority", *extension, *files)

    def issue(self, directory: Path, name: str, addresses: Iterable[str] = ()) -> Files:
        """Return a certificate for `name` and `addresses`, for servers and clients, in files of `directory`."""
        request, certificate, key = (directory / f"{name}.{kind}" for kind in ("csr", "pem", "key"))
        names = ",".join([f"DNS:{name}", *(f"IP:{address}" for address in addresses)])
        extensions = directory / f"{name}.ext"
        extensions.write_text(f"subjectAltName={names}\nextendedKeyUsage=serverAuth,clientAuth\n")
        _openssl("req", *KEY, "-subj", f"/CN={name}", "-keyout", str(key), "-out", str(request))
        signer = ("-CA", str(self.certificate), "-CAkey", str(self._key), "-CAcreateserial", "-days", "1")
        _openssl("x509", "-req", "-in", str(request), *signer, "-extfile", str(extensions), "-out", str(certificate))
        return Files(self.certificate, certificate, key)


def _openssl(*arguments: str) -> None:
    done = subprocess.run(["openssl", *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
