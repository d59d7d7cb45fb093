//! A Hugging Face hub on 127.0.0.1, with the faults that downloads meet.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

/// Commit of every answer.
pub const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// What is wrong with an answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fault {
    /// The connection ends after so many bytes of the body, although more were announced.
    Cut(usize),
    /// As [`Cut`](Self::Cut), without announcing a length: only the file's size tells.
    ShortWithoutLength(usize),
    /// This status and nothing else.
    Status(u16),
    /// Other bytes of the same length.
    WrongBytes,
    /// A tag that leads out of the cache folder.
    HostileTag,
    /// An HTML page with status 200.
    Page,
}

/// One file of the repository.
#[derive(Debug, Clone)]
pub struct File {
    /// Content.
    pub bytes: Vec<u8>,
    /// ETag.
    pub tag: String,
    /// Faults of the next body requests, one each.
    pub faults: Vec<Fault>,
}

#[derive(Default)]
struct State {
    files: BTreeMap<String, File>,
    listing: Option<Fault>,
    requests: Vec<String>,
}

/// The server; it ends with the test process.
#[derive(Clone)]
pub struct Hub {
    /// Address for `--endpoint`.
    pub endpoint: String,
    state: Arc<Mutex<State>>,
}

impl Hub {
    /// Starts a hub with one repository, `owner/model`.
    pub fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let hub = Self { endpoint, state: Arc::default() };
        let served = hub.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let hub = served.clone();
                std::thread::spawn(move || hub.serve(stream));
            }
        });
        hub
    }

    /// Adds or replaces a file; `tag` defaults to something short.
    pub fn put(&self, name: &str, bytes: &[u8], tag: Option<String>) -> &Self {
        let tag = tag.unwrap_or_else(|| format!("tag-{}-{}", name.len(), bytes.len()));
        let file = File { bytes: bytes.to_vec(), tag, faults: Vec::new() };
        self.state.lock().unwrap().files.insert(name.to_owned(), file);
        self
    }

    /// Makes the next body requests of a file fail, in order.
    pub fn fail(&self, name: &str, faults: &[Fault]) {
        self.state.lock().unwrap().files.get_mut(name).unwrap().faults = faults.to_vec();
    }

    /// Makes the listing fail from now on.
    pub fn fail_listing(&self, fault: Fault) {
        self.state.lock().unwrap().listing = Some(fault);
    }

    /// Requests of bodies since the last call, as `name range`.
    pub fn bodies(&self) -> Vec<String> {
        std::mem::take(&mut self.state.lock().unwrap().requests)
    }

    fn serve(&self, mut stream: TcpStream) {
        let mut lines = BufReader::new(stream.try_clone().unwrap()).lines().map_while(Result::ok);
        let Some(request) = lines.next() else { return };
        let headers: Vec<String> = lines.take_while(|line| !line.is_empty()).collect();
        let range =
            headers.iter().find_map(|line| line.to_lowercase().strip_prefix("range: bytes=").map(str::to_owned));
        let path = request.split(' ').nth(1).unwrap_or_default().to_owned();
        // A reader that has left is the test's business.
        let _ = match path.strip_prefix("/owner/model/resolve/main/") {
            Some(name) => self.file(&mut stream, name, &range.unwrap_or_default()),
            None if path == "/api/models/owner/model/revision/main" => self.list(&mut stream),
            None => status(&mut stream, 404),
        };
    }

    fn list(&self, stream: &mut TcpStream) -> std::io::Result<()> {
        let state = self.state.lock().unwrap();
        match &state.listing {
            Some(Fault::Status(code)) => status(stream, *code),
            Some(_) => body(stream, "200 OK", &[], b"<html>hello</html>"),
            None => {
                let siblings: Vec<_> = state.files.keys().map(|name| serde_json::json!({"rfilename": name})).collect();
                let json = serde_json::json!({"sha": COMMIT, "siblings": siblings}).to_string();
                body(stream, "200 OK", &[("Content-Type", "application/json")], json.as_bytes())
            }
        }
    }

    fn file(&self, stream: &mut TcpStream, name: &str, range: &str) -> std::io::Result<()> {
        let (mut file, fault) = {
            let mut state = self.state.lock().unwrap();
            let Some(file) = state.files.get_mut(name) else { return status(stream, 404) };
            // `0-0` asks for the headers.
            let is_probe = range == "0-0";
            let on_probe = matches!(file.faults.first(), Some(Fault::Status(_) | Fault::HostileTag | Fault::Page));
            let fault = (is_probe == on_probe && !file.faults.is_empty()).then(|| file.faults.remove(0));
            let file = file.clone();
            if !is_probe {
                state.requests.push(format!("{name} {range}"));
            }
            (file, fault)
        };
        let total = file.bytes.len();
        let (first, last) = range.split_once('-').unwrap_or(("0", ""));
        let first: usize = first.parse().unwrap_or(0);
        let end = last.parse().map_or(total, |last: usize| last + 1);
        if first >= total {
            return status(stream, 416);
        }
        match fault {
            Some(Fault::Status(code)) => return status(stream, code),
            Some(Fault::Page) => return body(stream, "200 OK", &[], b"<html>hello</html>"),
            Some(Fault::HostileTag) => file.tag = "../../../../escape".to_owned(),
            Some(Fault::WrongBytes) => file.bytes.iter_mut().for_each(|byte| *byte ^= 1),
            _ => (),
        }
        let part = &file.bytes[first..end];
        let tag = format!("\"{}\"", file.tag);
        let content_range = format!("bytes {first}-{}/{total}", end - 1);
        let mut headers = vec![("ETag", tag.as_str()), ("X-Repo-Commit", COMMIT), ("Content-Range", &content_range)];
        let length = part.len().to_string();
        let sent = match fault {
            Some(Fault::ShortWithoutLength(bytes)) => &part[..bytes],
            Some(Fault::Cut(bytes)) => {
                headers.push(("Content-Length", &length));
                &part[..bytes]
            }
            _ => {
                headers.push(("Content-Length", &length));
                part
            }
        };
        write(stream, "206 Partial Content", &headers, sent)
    }
}

fn status(stream: &mut TcpStream, code: u16) -> std::io::Result<()> {
    body(stream, &format!("{code} Some Reason"), &[], b"")
}

fn body(stream: &mut TcpStream, status: &str, headers: &[(&str, &str)], bytes: &[u8]) -> std::io::Result<()> {
    let length = bytes.len().to_string();
    write(stream, status, &[headers, &[("Content-Length", length.as_str())]].concat(), bytes)
}

fn write(stream: &mut TcpStream, status: &str, headers: &[(&str, &str)], bytes: &[u8]) -> std::io::Result<()> {
    write!(stream, "HTTP/1.1 {status}\r\nConnection: close\r\n")?;
    for (name, value) in headers {
        write!(stream, "{name}: {value}\r\n")?;
    }
    stream.write_all(b"\r\n")?;
    stream.write_all(bytes)?;
    stream.flush()
}
