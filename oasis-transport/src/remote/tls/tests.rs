use super::super::{Message, Secret, Service, Session, Terms, accept, connect};
use super::*;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair, date_time_ymd};
use std::time::Duration;
use tokio::net::TcpListener;

/// An authority, and certificates that it has signed for this machine, as files.
struct Authority {
    issuer: CertifiedIssuer<'static, KeyPair>,
    folder: tempfile::TempDir,
}

impl Authority {
    fn new(name: &str) -> Self {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("ca.pem"), issuer.pem()).unwrap();
        Self { issuer, folder }
    }

    fn file(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Files of a server with a certificate for `name`, valid until a year.
    fn server(&self, name: &str, until: i32) -> TlsFiles {
        let mut params = CertificateParams::new(vec![name.to_owned()]).unwrap();
        params.not_before = date_time_ymd(2000, 1, 1);
        params.not_after = date_time_ymd(until, 1, 1);
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        let (certificate_file, key_file) =
            (self.file(&format!("{name}-{until}.pem")), self.file(&format!("{name}.key")));
        std::fs::write(&certificate_file, certificate.pem()).unwrap();
        std::fs::write(&key_file, key.serialize_pem()).unwrap();
        TlsFiles { certificate: Some(certificate_file), key: Some(key_file), ..TlsFiles::default() }
    }

    fn client(&self) -> TlsFiles {
        TlsFiles { authorities: Some(self.file("ca.pem")), ..TlsFiles::default() }
    }
}

fn terms(files: &TlsFiles) -> Terms {
    let tls = Tls::load(files).unwrap();
    Terms { secret: Secret::new("open sesame"), tls, facts: Vec::new(), timeout: Duration::from_millis(800) }
}

/// What client and server say of an attempt to open a session.
async fn open(client: &TlsFiles, server: &TlsFiles) -> [Result<Session, SessionError>; 2] {
    let (client, server) = (terms(client), terms(server));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let accepted = async { accept(listener.accept().await.unwrap().0, Service::Prefill, &server).await };
    let (client, server) = tokio::join!(connect(address, Service::Prefill, &client), accepted);
    [client, server]
}

fn errors(opened: [Result<Session, SessionError>; 2]) -> [String; 2] {
    opened.map(|end| end.err().expect("no session").to_string())
}

#[tokio::test]
async fn messages_of_any_size_cross_an_encrypted_session() {
    let authority = Authority::new("authority");
    let [client, server] = open(&authority.client(), &authority.server("127.0.0.1", 2100)).await;
    let (mut client, mut server) = (client.unwrap(), server.unwrap());
    let large = Message::Blocks { id: 7, parts: vec![Ok(vec![5; 6 << 20]), Err("no".to_owned())] };
    for (from, to) in [(&client, &mut server)] {
        from.post(&large).unwrap();
        from.post(&Message::Release { request: 9 }).unwrap();
        assert_eq!(to.next().await.unwrap().message, large);
        assert_eq!(to.next().await.unwrap().message, Message::Release { request: 9 });
    }
    // Both ways at once.
    client.post(&large).unwrap();
    server.post(&large).unwrap();
    let (to_client, to_server) = tokio::join!(client.next(), server.next());
    assert!(to_client.unwrap().message == large && to_server.unwrap().message == large);
    server.send(&Message::Welcome).await.unwrap();
    drop(server);
    assert_eq!(client.next().await.unwrap().message, Message::Welcome);
    assert_eq!(client.next().await, Err(SessionError::Closed));
}

#[tokio::test]
async fn nothing_of_a_message_is_readable_on_the_way() {
    let authority = Authority::new("authority");
    let (client, server) = (terms(&authority.client()), terms(&authority.server("127.0.0.1", 2100)));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let relay = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (address, target) = (relay.local_addr().unwrap(), listener.local_addr().unwrap());
    let heard = tokio::spawn(async move {
        use tokio::io::{AsyncReadExt, AsyncWriteExt};
        let (mut from, mut to) = (relay.accept().await.unwrap().0, TcpStream::connect(target).await.unwrap());
        let (mut back, mut forth, mut heard) = (vec![0; 4096], vec![0; 4096], Vec::new());
        loop {
            tokio::select! {
                count = from.read(&mut forth) => match count.unwrap_or(0) {
                    0 => return heard,
                    count => {
                        heard.extend_from_slice(&forth[..count]);
                        to.write_all(&forth[..count]).await.unwrap();
                    }
                },
                count = to.read(&mut back) => from.write_all(&back[..count.unwrap_or(0)]).await.unwrap_or(()),
            }
        }
    });
    let accepted = async { accept(listener.accept().await.unwrap().0, Service::Prefill, &server).await };
    let (client, server) = tokio::join!(connect(address, Service::Prefill, &client), accepted);
    let (client, mut server) = (client.unwrap(), server.unwrap());
    let text = "a prompt that nobody else should read";
    client.post(&Message::Refused { request: 1, reason: text.to_owned() }).unwrap();
    server.next().await.unwrap();
    drop(client);
    let heard = heard.await.unwrap();
    let has = |part: &[u8]| heard.windows(part.len()).any(|window| window == part);
    assert!(!has(text.as_bytes()) && !has(b"OASISKV") && heard.len() > text.len());
}

#[tokio::test]
async fn a_server_that_is_not_trusted_is_left_with_the_reason() {
    let (authority, other) = (Authority::new("authority"), Authority::new("another"));
    for other in [other, Authority::new("authority")] {
        let [client, server] = errors(open(&other.client(), &authority.server("127.0.0.1", 2100)).await);
        assert!(client.contains("expected a certificate of an authority that is trusted here"), "{client}");
        assert!(server.contains("received fatal alert"), "{server}");
    }
    let [client, _] = errors(open(&authority.client(), &authority.server("127.0.0.1", 2001)).await);
    assert!(client.contains("found one that has expired"), "{client}");
    let [client, _] = errors(open(&authority.client(), &authority.server("example.com", 2100)).await);
    assert!(client.contains("expected a certificate for `127.0.0.1`"), "{client}");
}

#[tokio::test]
async fn plain_and_encrypted_ends_tell_each_other() {
    let authority = Authority::new("authority");
    let (plain, server) = (TlsFiles::default(), authority.server("127.0.0.1", 2100));
    let [client, found] = errors(open(&plain, &server).await);
    assert!(client.starts_with("refused: expected a client with TLS, found one without it"), "{client}");
    assert_eq!(client, found);
    let [client, found] = errors(open(&authority.client(), &plain).await);
    assert!(client.contains("expected a server with TLS, found one without it"), "{client}");
    assert!(found.contains("this node has no certificate"), "{found}");

    // Where it is optional both are served.
    let both = TlsFiles { is_optional: true, ..server };
    for client in [plain, authority.client()] {
        let [client, server] = open(&client, &both).await;
        client.unwrap().post(&Message::Welcome).unwrap();
        assert_eq!(server.unwrap().next().await.unwrap().message, Message::Welcome);
    }
}

#[tokio::test]
async fn a_client_that_says_nothing_is_left_in_time() {
    let authority = Authority::new("authority");
    let server = terms(&authority.server("127.0.0.1", 2100));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    for begin in [&[][..], &[HANDSHAKE], &[HANDSHAKE, 3, 1, 2, 0, 1]] {
        use tokio::io::AsyncWriteExt;
        let mut silent = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        silent.write_all(begin).await.unwrap();
        let error = accept(listener.accept().await.unwrap().0, Service::Prefill, &server).await.err().unwrap();
        assert_eq!(error, SessionError::TimedOut { what: "opening a session", after: server.timeout });
    }
}

#[test]
fn files_that_cannot_be_used_are_named() {
    let authority = Authority::new("authority");
    let good = authority.server("127.0.0.1", 2100);
    let other = authority.server("example.com", 2100);
    let empty = authority.file("empty.pem");
    std::fs::write(&empty, "no certificate\n").unwrap();
    let cases = [
        (TlsFiles { authorities: Some(authority.file("none.pem")), ..TlsFiles::default() }, "none.pem: expected cert"),
        (
            TlsFiles { authorities: Some(empty.clone()), ..TlsFiles::default() },
            "empty.pem: expected certificates in PEM",
        ),
        (TlsFiles { certificate: None, ..good.clone() }, "expected a certificate beside the private key, found none"),
        (TlsFiles { key: None, ..good.clone() }, "expected a private key beside the certificate, found none"),
        (TlsFiles { key: Some(empty), ..good.clone() }, "empty.pem: expected a private key in PEM"),
        (TlsFiles { key: other.key, ..good }, "127.0.0.1-2100.pem: expected a certificate of the key"),
    ];
    for (files, expected) in cases {
        let error = Tls::load(&files).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
}
