"""The TLS files that the settings name. It reads none of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from inference.server.tls import TlsFiles

if TYPE_CHECKING:
    from config.options import Options


def tls_files(options: Options) -> TlsFiles | None:
    """The TLS files of all listeners that have none of their own."""
    if options.tls_certificate is None or options.tls_key is None:
        return None
    return TlsFiles(
        options.tls_certificate,
        options.tls_key,
        tuple(options.tls_client_authorities),
        tuple(options.tls_revocation_lists),
        options.tls_key_password_file,
        tls_1_2=True,
    )


def cluster_files(options: Options) -> TlsFiles | None:
    """The files by which this host is known to the cluster's others."""
    if options.cluster_authority is None or options.cluster_certificate is None or options.cluster_key is None:
        return None
    return TlsFiles(
        options.cluster_certificate,
        options.cluster_key,
        (options.cluster_authority,),
        (options.cluster_revocations,) if options.cluster_revocations else (),
        password=options.cluster_key_password_file,
    )
