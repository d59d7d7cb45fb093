//! What blocks can cross between nodes over: UCX and the RDMA adapters of this machine.

use oasis_core::config::{NodeTransport, NodesConfig};
use oasis_transport::remote::ucx_settings;
use oasis_ucx::{LIBRARY, Search, probe};
use serde::Serialize;

/// What was found, and what would be taken.
#[derive(Debug, Serialize)]
pub struct Fabric {
    /// What is configured.
    transport: NodeTransport,
    /// The library that is looked for, and its release where it is found.
    library: String,
    ucx: Option<String>,
    /// Ports of RDMA adapters.
    ports: Vec<probe::Port>,
    /// The port that `roce` would take.
    chosen: Option<String>,
    /// Why the configured transport cannot be used.
    pub problem: Option<String>,
}

impl Fabric {
    pub fn examine(config: &NodesConfig) -> Self {
        // With `tcp` as well: what another choice would find.
        let settings = ucx_settings(&NodesConfig { transport: NodeTransport::Roce, ..config.clone() });
        let (search, device) = settings.map_or((Search::default(), None), |s| (s.search, s.device));
        let ports = probe::ports();
        let chosen = probe::chosen(&ports, device.as_deref()).map(|port| port.name.clone());
        let version = search.version();
        let problem = match (config.transport, &version, &chosen) {
            (NodeTransport::Tcp, ..) => None,
            (_, Err(missing), _) => Some(missing.to_string()),
            (NodeTransport::Roce, Ok(_), None) => {
                Some("nodes.transport = \"roce\": expected an RDMA adapter that is up, found none.".to_owned())
            }
            _ => None,
        };
        let library = search.path.map_or_else(|| LIBRARY.to_owned(), |path| path.display().to_string());
        Self { transport: config.transport, library, ucx: version.ok(), ports, chosen, problem }
    }

    /// Lines of the report.
    pub fn rows(&self) -> Vec<(&'static str, String)> {
        let mut rows = vec![(
            "ucx",
            match &self.ucx {
                Some(version) => format!("{version}, {}", self.library),
                None => format!("not found ({})", self.library),
            },
        )];
        if self.ports.is_empty() {
            rows.push(("rdma", "no adapter".to_owned()));
        }
        for port in &self.ports {
            let state = if port.active { "up" } else { "down" };
            let gid = port.gid.as_ref().map_or_else(String::new, |(index, gid)| format!(", GID {index} ({gid})"));
            let node = port.numa_node.map_or_else(String::new, |node| format!(", NUMA node {node}"));
            rows.push(("rdma", format!("{}: {state}, {}, {}{gid}{node}", port.name, port.link, port.rate)));
        }
        let roce = match (&self.ucx, &self.chosen) {
            (None, _) => "roce cannot be used: UCX is missing".to_owned(),
            (_, None) => "roce cannot be used: no RDMA adapter that is up".to_owned(),
            (Some(_), Some(port)) => format!("roce would use rc on {port}"),
        };
        let configured = match self.transport {
            NodeTransport::Tcp => "tcp",
            NodeTransport::Roce => "roce",
            NodeTransport::UcxTcp => "ucx-tcp",
        };
        rows.push(("nodes.transport", format!("{configured}; {roce}")));
        rows
    }
}
