//! Prefill and decode nodes in two network namespaces, over links of limited bandwidth and a delay. Needs root, `ip` and
//! `tc`; says aloud when it cannot run.

mod common;

use common::{has_ucx, oasis, outcome};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};
use tempfile::tempdir;

/// Bits a second of each link, as `tc` writes it.
const RATE: (&str, f64) = ("100mbit", 100e6);
/// Each way. By a relay between the namespaces, for not every kernel has netem.
const DELAY: Duration = Duration::from_millis(5);

fn shell(line: &str) -> Result<(), String> {
    let words: Vec<&str> = line.split(' ').collect();
    let output = Command::new(words[0]).args(&words[1..]).output().map_err(|error| format!("{line}: {error}"))?;
    match output.status.success() {
        true => Ok(()),
        false => Err(format!("{line}: {}", String::from_utf8_lossy(&output.stderr).trim())),
    }
}

fn limit() -> String {
    format!("root tbf rate {} burst 64kb latency 400ms", RATE.0)
}

/// The first half of every address: another for another process, so that two may run the test at a time.
fn network() -> String {
    format!("10.{}", 64 + std::process::id() % 128)
}

/// A namespace and its link to this one: `{network}.{number}.1` here, `{network}.{number}.2` there.
struct Namespace {
    name: String,
    here: String,
    there: String,
}

impl Namespace {
    fn new(number: u8) -> Result<Self, String> {
        let name = format!("oasis{}n{number}", std::process::id() % 100_000);
        shell(&format!("ip netns add {name}"))?;
        let network = network();
        let (here, there) = (format!("{network}.{number}.1"), format!("{network}.{number}.2"));
        let namespace = Self { name, here, there };
        let Self { name, here, there } = &namespace;
        let limit = limit();
        for line in [
            format!("ip link add {name}h type veth peer name eth0 netns {name}"),
            format!("ip addr add {here}/24 dev {name}h"),
            format!("ip link set {name}h up"),
            format!("ip -n {name} addr add {there}/24 dev eth0"),
            format!("ip -n {name} link set eth0 up"),
            format!("ip -n {name} link set lo up"),
            format!("tc qdisc add dev {name}h {limit}"),
            format!("ip netns exec {name} tc qdisc add dev eth0 {limit}"),
        ] {
            shell(&line)?;
        }
        Ok(namespace)
    }

    /// A link of its own to another namespace, `eth1` at both ends: what UCX uses.
    fn join(&self, other: &Self) -> Result<(), String> {
        let (a, b) = (&self.name, &other.name);
        shell(&format!("ip -n {a} link add eth1 type veth peer name eth1 netns {b}"))?;
        for (name, end) in [(a, 1), (b, 2)] {
            shell(&format!("ip -n {name} addr add {}.3.{end}/24 dev eth1", network()))?;
            shell(&format!("ip -n {name} link set eth1 up"))?;
            shell(&format!("ip netns exec {name} tc qdisc add dev eth1 {}", limit()))?;
        }
        Ok(())
    }

    /// `oasis` inside.
    fn oasis(&self, folder: &Path) -> Command {
        let outside = oasis(folder);
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.name]).arg(outside.get_program()).current_dir(folder);
        for (name, value) in outside.get_envs() {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        command
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        // Its end of the link goes with it, and so does ours.
        if let Err(error) = shell(&format!("ip netns del {}", self.name)) {
            eprintln!("{error}");
        }
    }
}

/// Passes pieces on, each [`DELAY`] after it came.
fn delayed(mut from: TcpStream, mut to: TcpStream) {
    let (sender, pieces) = channel::<(Instant, Vec<u8>)>();
    std::thread::spawn(move || {
        for (came, piece) in pieces {
            std::thread::sleep((came + DELAY).saturating_duration_since(Instant::now()));
            if to.write_all(&piece).is_err() {
                break;
            }
        }
        let _ = to.shutdown(Shutdown::Write);
    });
    std::thread::spawn(move || {
        let mut buffer = vec![0; 64 << 10];
        while let Ok(count @ 1..) = from.read(&mut buffer) {
            if sender.send((Instant::now(), buffer[..count].to_vec())).is_err() {
                break;
            }
        }
    });
}

/// Leads from an address here to `target`.
fn relay(here: &str, target: String) -> String {
    let listener = TcpListener::bind((here, 0)).unwrap();
    let address = listener.local_addr().unwrap().to_string();
    // Ends with the test's process.
    std::thread::spawn(move || {
        for client in listener.incoming().flatten() {
            let Ok(server) = TcpStream::connect(&target) else { continue };
            for stream in [&client, &server] {
                stream.set_nodelay(true).unwrap();
            }
            delayed(client.try_clone().unwrap(), server.try_clone().unwrap());
            delayed(server, client);
        }
    });
    address
}

/// A node that is killed when the test ends.
struct Node(Child);

impl Node {
    fn start(mut command: Command, role: &str, args: &[&str]) -> (Self, String) {
        command.args(["serve-node", "--role", role]).args(args).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        let address = line.trim_end().strip_prefix(&format!("{role} node: listening on ")).map(str::to_owned);
        (Self(child), address.unwrap_or_else(|| panic!("expected an address, found {line:?}")))
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn json(command: &mut Command) -> serde_json::Value {
    let (code, out, err) = outcome(command.stdin(Stdio::null()).output().unwrap());
    assert_eq!(code, 0, "{err}");
    serde_json::from_str(&out).unwrap()
}

/// A model with the settings of all three processes, and its prompt.
struct Case {
    name: &'static str,
    settings: Vec<String>,
    prompt: String,
}

fn cases() -> Vec<Case> {
    let license = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../LICENSE")).unwrap();
    let set = |pairs: &[&str]| pairs.iter().flat_map(|pair| ["--set".to_owned(), (*pair).to_owned()]).collect();
    let mut cases = vec![Case {
        name: "oasis-tiny",
        settings: set(&["kv.budget_blocks=32", "selector.fetch_ratio=0.1"]),
        prompt: license.clone(),
    }];
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let gguf = std::env::var_os("OASIS_SMOLLM2_GGUF")
        .map_or_else(|| root.join(".models/SmolLM2-135M-Instruct.Q4_1.gguf"), PathBuf::from);
    match gguf.exists() {
        false => eprintln!("SKIPPED: SmolLM2: {} is missing: run scripts/fetch-smollm2.sh", gguf.display()),
        true => cases.push(Case {
            name: "SmolLM2-135M",
            settings: set(&[
                &format!("model.path={}", gguf.display()),
                "model.draft=smollm2-135m-eagle3",
                "kv.budget_blocks=32",
                "selector.fetch_ratio=0.1",
            ]),
            prompt: license.chars().take(6000).collect(),
        }),
    }
    cases
}

#[test]
fn two_namespaces_say_what_one_node_says() {
    let pair = Namespace::new(1).and_then(|one| {
        let two = Namespace::new(2)?;
        one.join(&two)?;
        Ok((one, two))
    });
    let (prefill_side, decode_side) = match pair {
        Ok(sides) => sides,
        Err(problem) => return eprintln!("SKIPPED: two network namespaces (root, ip and tc are needed): {problem}"),
    };
    let folder = tempdir().unwrap();
    let folder = folder.path();
    std::fs::write(folder.join("secret"), "open sesame\n").unwrap();
    println!(
        "two namespaces, links of {} (tc tbf); {} ms each way (relay) for messages, none for UCX's own link",
        RATE.0,
        DELAY.as_millis()
    );
    let by_ucx = ["nodes.transport=ucx-tcp", "nodes.ucx_device=eth1"].map(|set| ["--set", set]).concat();
    let transports: &[(&str, &[&str])] = match has_ucx() {
        true => &[("tcp", &[]), ("ucx-tcp", &by_ucx)],
        false => &[("tcp", &[])],
    };
    println!(
        "{:<13} {:<8} {:<8} {:>6} {:>13} {:>10} {:>8} {:>7} {:>8} {:>7}  tokens",
        "model",
        "blocks",
        "transfer",
        "prompt",
        "admission MiB",
        "misses MiB",
        "crossed",
        "first",
        "tokens/s",
        "Mbit/s"
    );
    for Case { name, settings, prompt } in cases() {
        std::fs::write(folder.join("prompt"), &prompt).unwrap();
        let ask = ["--file", "prompt", "-n", "48", "--ignore-eos", "--json"];
        let expected = json(oasis(folder).arg("run").args(ask).args(&settings));
        let secret = ["--secret-file", "secret"];
        for (blocks, more) in transports {
            let settings: Vec<&str> = settings.iter().map(String::as_str).chain(more.iter().copied()).collect();
            let listen = format!("{}:0", prefill_side.there);
            let args = [&["--listen", &listen][..], &secret, &settings].concat();
            let (_prefill, address) = Node::start(prefill_side.oasis(folder), "prefill", &args);
            let address = relay(&decode_side.here, address);
            for transfer in ["full", "partial"] {
                let args = [&["--peer", &address, "--transfer", transfer][..], &secret, &settings].concat();
                let (_decode, node) = Node::start(decode_side.oasis(folder), "decode", &args);
                let mut client = decode_side.oasis(folder);
                let document = json(client.args(["run", "--node", &node]).args(ask).args(secret).args(&settings));
                let number = |key: &str| document["node"][key].as_f64().unwrap();
                let mib = |key: &str| number(key) / f64::from(1 << 20);
                let same = document["tokens"] == expected["tokens"] && document["text"] == expected["text"];
                let first = number("first_token_seconds");
                let rate = (number("admission_bytes") + number("state_bytes")) * 8.0 / first;
                println!(
                    "{name:<13} {blocks:<8} {transfer:<8} {:>6} {:>13.2} {:>10.2} {:>7.1}% {first:>5.2} s {:>8.1} {:>7.1}  {}",
                    number("prompt_tokens"),
                    mib("admission_bytes"),
                    mib("miss_bytes"),
                    number("blocks") * 100.0 / number("prompt_blocks"),
                    number("decode_tokens_per_second"),
                    rate / 1e6,
                    if same { "same" } else { "OTHER" },
                );
                assert!(same, "{name}, {blocks}, {transfer}: {document}");
                // UCX has a second link beside that of the messages.
                let links = if more.is_empty() { 1.0 } else { 2.0 };
                assert!(
                    rate < links * RATE.1 * 1.05,
                    "{name}, {blocks}, {transfer}: the link is not limited: {document}"
                );
                assert_eq!(number("blocks") == number("prompt_blocks"), transfer == "full", "{document}");
                assert_eq!(number("misses") == 0.0, transfer == "full", "{document}");
            }
        }
    }
}
