//! What RDMA adapters this machine has, from `/sys/class/infiniband`.

use crate::error::Unavailable;
use serde::Serialize;
use std::net::Ipv6Addr;
use std::path::Path;

const DEVICES: &str = "/sys/class/infiniband";

/// A port of an adapter.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Port {
    /// Name that UCX knows it by, such as `mlx5_0:1`.
    pub name: String,
    /// `Ethernet` (RoCE) or `InfiniBand`.
    pub link: String,
    /// Whether it is up.
    pub active: bool,
    /// Rate, in the driver's words.
    pub rate: String,
    /// NUMA node of the adapter.
    pub numa_node: Option<u32>,
    /// Index and address of the GID that RoCE would use: the first of RoCE v2 with an IPv4 address, else the first of v2.
    pub gid: Option<(u32, String)>,
}

/// Every port of every adapter; empty where there is none.
pub fn ports() -> Vec<Port> {
    ports_under(Path::new(DEVICES))
}

fn text(path: &Path) -> Option<String> {
    std::fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
}

/// Names in a folder, in order.
fn names(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort_by_key(|name| (name.len(), name.clone()));
    names
}

fn ports_under(devices: &Path) -> Vec<Port> {
    let mut ports = Vec::new();
    for device in names(devices) {
        let folder = devices.join(&device);
        for number in names(&folder.join("ports")) {
            let port = folder.join("ports").join(&number);
            let of = |name: &str| text(&port.join(name)).unwrap_or_default();
            ports.push(Port {
                name: format!("{device}:{number}"),
                link: of("link_layer"),
                active: of("state").contains("ACTIVE"),
                rate: of("rate"),
                numa_node: text(&folder.join("device/numa_node")).and_then(|node| node.parse().ok()),
                gid: gid(&port),
            });
        }
    }
    ports
}

fn gid(port: &Path) -> Option<(u32, String)> {
    let mut first = None;
    for index in names(&port.join("gids")) {
        let Some(kind) = text(&port.join("gid_attrs/types").join(&index)) else { continue };
        let Some(address) = text(&port.join("gids").join(&index)) else { continue };
        let (Ok(number), Ok(parsed)) = (index.parse(), address.parse::<Ipv6Addr>()) else { continue };
        if kind != "RoCE v2" || parsed.is_unspecified() {
            continue;
        }
        if let Some(v4) = parsed.to_ipv4_mapped() {
            return Some((number, v4.to_string()));
        }
        first.get_or_insert((number, parsed.to_string()));
    }
    first
}

/// The port that reads would go through: `device` itself, or the first one that is up.
pub fn chosen<'a>(ports: &'a [Port], device: Option<&str>) -> Option<&'a Port> {
    let first = device.and_then(|devices| devices.split(',').next());
    ports.iter().find(|port| port.active && first.is_none_or(|first| port.name == first))
}

/// # Errors
/// When no port is up, or not the one that is asked for.
pub(crate) fn require_adapter(device: Option<&str>) -> Result<(), Unavailable> {
    let ports = ports();
    if chosen(&ports, device).is_some() {
        return Ok(());
    }
    let states = ports.iter().map(|port| format!("{} {}", port.name, if port.active { "up" } else { "down" }));
    let states: Vec<String> = states.collect();
    Err(Unavailable {
        what: "RDMA transport unavailable".to_owned(),
        expected: device.map_or_else(|| "an RDMA adapter that is up".to_owned(), |device| format!("{device}, up")),
        found: if states.is_empty() { format!("none in {DEVICES}") } else { states.join(", ") },
        hint: "nodes.transport = \"tcp\" needs no adapter; containers need /dev/infiniband; oasis doctor lists what there is"
            .to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A machine with one adapter of two ports, the second one down.
    fn machine(root: &Path) {
        let write = |path: &str, text: &str| {
            let path = root.join("mlx5_0").join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        write("device/numa_node", "1\n");
        for (number, state) in [(1, "4: ACTIVE\n"), (2, "1: DOWN\n")] {
            write(&format!("ports/{number}/link_layer"), "Ethernet\n");
            write(&format!("ports/{number}/state"), state);
            write(&format!("ports/{number}/rate"), "200 Gb/sec (4X HDR)\n");
        }
        for (index, gid, kind) in [
            (0, "fe80:0000:0000:0000:0a00:0000:0000:0001", "IB/RoCE v1"),
            (1, "fe80:0000:0000:0000:0a00:0000:0000:0001", "RoCE v2"),
            (2, "0000:0000:0000:0000:0000:ffff:0a01:0203", "IB/RoCE v1"),
            (3, "0000:0000:0000:0000:0000:ffff:0a01:0203", "RoCE v2"),
            (4, "0000:0000:0000:0000:0000:0000:0000:0000", "RoCE v2"),
        ] {
            write(&format!("ports/1/gids/{index}"), gid);
            write(&format!("ports/1/gid_attrs/types/{index}"), kind);
        }
    }

    #[test]
    fn the_port_that_is_up_and_its_gid_are_found() {
        let root = std::env::temp_dir().join(format!("oasis-ucx-probe-{}", std::process::id()));
        machine(&root);
        let ports = ports_under(&root);
        std::fs::remove_dir_all(&root).unwrap();
        let names: Vec<&str> = ports.iter().map(|port| port.name.as_str()).collect();
        assert_eq!(names, ["mlx5_0:1", "mlx5_0:2"]);
        let port = chosen(&ports, None).unwrap();
        assert_eq!((port.link.as_str(), port.numa_node), ("Ethernet", Some(1)));
        assert_eq!(port.gid, Some((3, "10.1.2.3".to_owned())));
        assert_eq!(chosen(&ports, Some("mlx5_0:1,mlx5_1:1")), Some(port));
        assert_eq!((chosen(&ports, Some("mlx5_0:2")), chosen(&ports, Some("mlx5_9:1"))), (None, None));
        assert!(ports_under(&root).is_empty());
    }
}
