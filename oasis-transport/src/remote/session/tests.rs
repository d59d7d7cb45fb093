use super::*;
use tokio::net::TcpListener;

fn terms(secret: &str, facts: &[(&str, u32)]) -> Terms {
    let facts = facts.iter().map(|(name, value)| Fact::new(*name, value)).collect();
    Terms { secret: Secret::new(secret), tls: Tls::default(), facts, timeout: Duration::from_millis(400) }
}

/// What client and server say of an attempt to open a session.
async fn open(
    client: &Terms,
    server: &Terms,
    service: Service,
) -> (Result<Session, SessionError>, Result<Session, SessionError>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let accepted = async { accept(listener.accept().await.unwrap().0, Service::Prefill, server).await };
    tokio::join!(connect(address, service, client), accepted)
}

fn refusal(result: Result<Session, SessionError>) -> String {
    match result {
        Err(SessionError::Refused(reason)) => reason,
        Err(other) => panic!("expected a refusal, found: {other}"),
        Ok(_) => panic!("expected a refusal, found a session"),
    }
}

#[tokio::test]
async fn ends_that_agree_exchange_messages_in_order() {
    let facts = [("layers", 2), ("heads", 3)];
    for secret in ["", "open sesame"] {
        let (client, server) = open(&terms(secret, &facts), &terms(secret, &facts), Service::Prefill).await;
        let (mut client, mut server) = (client.unwrap(), server.unwrap());
        // Larger than a socket's buffers.
        let large = Message::Blocks { id: 7, parts: vec![Ok(vec![5; 6 << 20]), Err("no".to_owned())] };
        let size = client.post(&large).unwrap();
        client.post(&Message::Release { request: 9 }).unwrap();
        let received = server.next().await.unwrap();
        assert_eq!((received.bytes, received.message), (size, large));
        assert_eq!(server.next().await.unwrap().message, Message::Release { request: 9 });
        server.send(&Message::Welcome).await.unwrap();
        drop(server);
        assert_eq!(client.next().await.unwrap().message, Message::Welcome);
        assert_eq!(client.next().await, Err(SessionError::Closed));
    }
}

#[tokio::test]
async fn the_secret_must_be_the_same() {
    for (client, server) in [("right", "wrong"), ("", "right"), ("right", "")] {
        let (client, server) = open(&terms(client, &[]), &terms(server, &[]), Service::Prefill).await;
        // The server proves itself first, so the client sees it and goes.
        assert_eq!(refusal(client), WRONG_SECRET);
        assert_eq!(server.err(), Some(SessionError::Closed));
    }
}

#[tokio::test]
async fn a_server_does_not_believe_a_client_that_skips_the_check() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let right = terms("right", &[]);
    let liar = async {
        let mut stream = TcpStream::connect(address).await.unwrap();
        let hello = Message::Hello { version: WIRE_VERSION, service: Service::Prefill, nonce: [1; 32] };
        send_greeting(&mut stream, &hello).await.unwrap();
        let Message::Challenge { proof, .. } = read_greeting(&mut stream, &right).await.unwrap() else {
            panic!("expected a challenge");
        };
        // The server's own proof, sent back.
        send_greeting(&mut stream, &Message::Proof { proof, facts: Vec::new() }).await.unwrap();
        read_greeting(&mut stream, &right).await.unwrap()
    };
    let accepted = async { accept(listener.accept().await.unwrap().0, Service::Prefill, &right).await };
    let (answer, accepted) = tokio::join!(liar, accepted);
    assert_eq!(answer, Message::Refused { request: 0, reason: WRONG_SECRET.to_owned() });
    assert_eq!(refusal(accepted), WRONG_SECRET);
}

#[tokio::test]
async fn what_ends_do_not_agree_on_is_named() {
    let ours = [("layers", 2), ("kv.block_tokens", 16)];
    let cases: [(&[(&str, u32)], &str); 4] = [
        (&[("layers", 2), ("kv.block_tokens", 32)], "kv.block_tokens: expected 16, found 32; both nodes need the same"),
        (&[("layers", 2)], "kv.block_tokens: expected 16, found nothing; both nodes need the same"),
        (&[("layers", 2), ("blocks", 16)], "kv.block_tokens: expected 16, found blocks; both nodes need the same"),
        (
            &[("layers", 2), ("kv.block_tokens", 16), ("more", 1)],
            "more: expected nothing, found 1; both nodes need the same",
        ),
    ];
    for (theirs, expected) in cases {
        let (client, server) = open(&terms("s", theirs), &terms("s", &ours), Service::Prefill).await;
        assert_eq!((refusal(client).as_str(), refusal(server).as_str()), (expected, expected));
    }
    let (client, _) = open(&terms("s", &ours), &terms("s", &ours), Service::Decode).await;
    assert_eq!(refusal(client), "role: expected a client of a prefill node, found one of a decode");
}

#[tokio::test]
async fn silence_and_garbage_end_in_time() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let ours = terms("", &[]);
    // A client that says nothing, one that says garbage, one that begins a message, one that announces a large one.
    let greetings: [&[u8]; 4] = [b"", b"GET / HTTP/1.1\r\n\r\n", &[60, 0, 0, 0, 1], &[0xff; 8]];
    for greeting in greetings {
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(greeting).await.unwrap();
        let accepted = accept(listener.accept().await.unwrap().0, Service::Prefill, &ours);
        let error = timeout(Duration::from_secs(5), accepted).await.expect("a deadline").err().unwrap();
        assert!(matches!(error, SessionError::TimedOut { .. } | SessionError::Damaged(_)), "{error}");
    }
    // A server that accepts and says nothing.
    let error = timeout(Duration::from_secs(5), connect(address, Service::Prefill, &ours)).await.expect("a deadline");
    assert_eq!(error.err(), Some(SessionError::TimedOut { what: "opening a session", after: ours.timeout }));
}

#[tokio::test]
async fn a_message_that_stops_half_way_ends_the_session() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let mut client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
    let limit = Duration::from_millis(100);
    let mut session = Session::start(Stream::Plain(listener.accept().await.unwrap().0), limit);
    // Idleness between messages is nothing.
    tokio::time::sleep(3 * limit).await;
    client.write_all(&[9, 0, 0, 0, 13, 1]).await.unwrap();
    assert_eq!(session.next().await, Err(SessionError::TimedOut { what: "the rest of a message", after: limit }));
}

#[tokio::test]
async fn a_peer_that_does_not_read_is_given_up() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let _client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
    let limit = Duration::from_millis(100);
    let mut session = Session::start(Stream::Plain(listener.accept().await.unwrap().0), limit);
    let large = Message::Blocks { id: 1, parts: vec![Ok(vec![0; 64 << 20])] };
    assert_eq!(session.send(&large).await, Err(SessionError::Closed));
    assert_eq!(session.next().await, Err(SessionError::TimedOut { what: "sending a message", after: limit }));
}
