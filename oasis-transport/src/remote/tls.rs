//! TLS 1.3 below a session: the server shows a certificate, the client checks it; both still prove the shared secret.

use super::error::SessionError;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokio::net::TcpStream;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio_rustls::rustls::{self, CertificateError, ClientConfig, RootCertStore, ServerConfig, version::TLS13};
use tokio_rustls::{TlsAcceptor, TlsConnector, TlsStream};

/// First byte of a TLS handshake (RFC 8446, section 5.1). A plain session begins with the length of its greeting, which is
/// another.
const HANDSHAKE: u8 = 22;

/// PEM files of one node.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TlsFiles {
    /// Certificates of the authorities whose servers are trusted. With them every connection that is opened is TLS.
    pub authorities: Option<PathBuf>,
    /// This node's certificate, then those between it and its authority. With it clients may connect by TLS.
    pub certificate: Option<PathBuf>,
    /// The certificate's private key: PKCS #8, SEC 1 or PKCS #1.
    pub key: Option<PathBuf>,
    /// Whether clients may connect without TLS too, where there is a certificate.
    pub is_optional: bool,
}

/// A file that cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{file}: expected {expected}, found {found}")]
pub struct TlsError {
    file: String,
    expected: &'static str,
    found: String,
}

impl TlsError {
    fn new(file: &Path, expected: &'static str, found: impl ToString) -> Self {
        Self { file: file.display().to_string(), expected, found: found.to_string() }
    }
}

/// What a node needs for TLS; nothing of it, and its sessions are plain.
#[derive(Clone, Default)]
pub struct Tls {
    client: Option<Arc<ClientConfig>>,
    server: Option<Arc<ServerConfig>>,
    is_optional: bool,
}

impl std::fmt::Debug for Tls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { client, server, is_optional } = self;
        write!(f, "Tls {{ client: {}, server: {}, is_optional: {is_optional} }}", client.is_some(), server.is_some())
    }
}

impl Tls {
    /// Reads the files.
    ///
    /// # Errors
    /// Names the file that cannot be read, holds something else, or is missing beside another.
    pub fn load(files: &TlsFiles) -> Result<Self, TlsError> {
        let client = files.authorities.as_deref().map(client_config).transpose()?;
        let server = match (&files.certificate, &files.key) {
            (None, None) => None,
            (Some(certificate), Some(key)) => Some(server_config(certificate, key)?),
            (Some(only), None) => return Err(TlsError::new(only, "a private key beside the certificate", "none")),
            (None, Some(only)) => return Err(TlsError::new(only, "a certificate beside the private key", "none")),
        };
        Ok(Self { client, server, is_optional: files.is_optional })
    }

    /// The client's end of a connection to `host`, a name or an address.
    pub(super) async fn connect(&self, stream: TcpStream, host: &str) -> Result<Stream, SessionError> {
        let Some(config) = &self.client else { return Ok(Stream::Plain(stream)) };
        let name = ServerName::try_from(host.to_owned())
            .map_err(|_| SessionError::Tls(format!("expected a name or an address, found `{host}`")))?;
        match TlsConnector::from(config.clone()).connect(name, stream).await {
            Ok(stream) => Ok(Stream::Tls(Box::new(stream.into()))),
            Err(error) => Err(SessionError::Tls(complaint(&error, host))),
        }
    }

    /// The server's end. A client that begins in the wrong way may be told through the stream.
    pub(super) async fn accept(&self, stream: TcpStream) -> Result<Stream, (Option<TcpStream>, SessionError)> {
        let mut first = [0];
        match stream.peek(&mut first).await {
            Ok(1) => {}
            Ok(_) => return Err((None, SessionError::Closed)),
            Err(error) => return Err((None, error.into())),
        }
        let Some(config) = self.server.clone().filter(|_| first[0] == HANDSHAKE) else {
            if first[0] == HANDSHAKE {
                let text = "expected a client without TLS, found one with it: this node has no certificate";
                // To the client it is no TLS, which says the same.
                return Err((Some(stream), SessionError::Refused(text.to_owned())));
            }
            if self.server.is_some() && !self.is_optional {
                let text = "expected a client with TLS, found one without it\n  hint: name the authority of the node's \
                            certificate";
                return Err((Some(stream), SessionError::Refused(text.to_owned())));
            }
            return Ok(Stream::Plain(stream));
        };
        match TlsAcceptor::from(config).accept(stream).await {
            Ok(stream) => Ok(Stream::Tls(Box::new(stream.into()))),
            Err(error) => Err((None, SessionError::Tls(error.to_string()))),
        }
    }
}

/// A connection, plain or not.
pub(super) enum Stream {
    Plain(TcpStream),
    Tls(Box<TlsStream<TcpStream>>),
}

fn certificates(file: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    const EXPECTED: &str = "certificates in PEM";
    let read = CertificateDer::pem_file_iter(file).map_err(|error| TlsError::new(file, EXPECTED, error))?;
    let read: Vec<_> = read.collect::<Result<_, _>>().map_err(|error| TlsError::new(file, EXPECTED, error))?;
    match read.is_empty() {
        true => Err(TlsError::new(file, EXPECTED, "none")),
        false => Ok(read),
    }
}

fn client_config(authorities: &Path) -> Result<Arc<ClientConfig>, TlsError> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates(authorities)? {
        roots.add(certificate).map_err(|error| TlsError::new(authorities, "certificates of authorities", error))?;
    }
    let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_protocol_versions(&[&TLS13])
        .map_err(|error| TlsError::new(authorities, "TLS 1.3", error))?;
    Ok(Arc::new(builder.with_root_certificates(roots).with_no_client_auth()))
}

fn server_config(certificate: &Path, key: &Path) -> Result<Arc<ServerConfig>, TlsError> {
    let chain = certificates(certificate)?;
    // The error of a key that cannot be read shows nothing of it.
    let private =
        PrivateKeyDer::from_pem_file(key).map_err(|error| TlsError::new(key, "a private key in PEM", error))?;
    let config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_protocol_versions(&[&TLS13])
        .and_then(|builder| builder.with_no_client_auth().with_single_cert(chain, private))
        .map_err(|error| TlsError::new(certificate, "a certificate of the key", error))?;
    Ok(Arc::new(config))
}

/// Why a server was not accepted, in words that say what to change.
fn complaint(error: &io::Error, host: &str) -> String {
    let inner = error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>());
    match inner {
        Some(rustls::Error::InvalidCertificate(CertificateError::UnknownIssuer | CertificateError::BadSignature)) => {
            "expected a certificate of an authority that is trusted here, found one of another".to_owned()
        }
        Some(rustls::Error::InvalidCertificate(
            CertificateError::Expired | CertificateError::ExpiredContext { .. },
        )) => "expected a certificate that is valid now, found one that has expired".to_owned(),
        Some(rustls::Error::InvalidCertificate(
            CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. },
        )) => format!("expected a certificate for `{host}`, found one for another name"),
        Some(rustls::Error::InvalidMessage(_)) => "expected a server with TLS, found one without it".to_owned(),
        _ if error.kind() == io::ErrorKind::UnexpectedEof => {
            "expected a server with TLS, found one that closed the connection".to_owned()
        }
        _ => error.to_string(),
    }
}

#[cfg(test)]
mod tests;
