//! The thread that serves a node's sockets.

use anyhow::Context;
use oasis_transport::remote::Terms;
use std::net::{SocketAddr, TcpListener, ToSocketAddrs};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;
use tokio::net::TcpStream;
use tokio::runtime::{Builder, Handle};
use tokio::sync::{Semaphore, oneshot};

/// A runtime on a thread of its own. Dropping it ends every task.
pub struct IoThread {
    handle: Handle,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl IoThread {
    pub fn start(name: &str) -> std::io::Result<Self> {
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let handle = runtime.handle().clone();
        let (stop, stopped) = oneshot::channel::<()>();
        let thread = std::thread::Builder::new().name(name.to_owned()).spawn(move || {
            // Stopped by a message or by the sender's end.
            let _ = runtime.block_on(stopped);
        })?;
        Ok(Self { handle, stop: Some(stop), thread: Some(thread) })
    }

    pub fn handle(&self) -> &Handle {
        &self.handle
    }
}

impl Drop for IoThread {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take() {
            // A panic of a task is a bug of ours; it has been printed already.
            let _ = thread.join();
        }
    }
}

/// Listens on `address`; any but a loopback address needs a secret.
pub fn listen(address: &str, terms: &Terms) -> anyhow::Result<TcpListener> {
    let addresses = address.to_socket_addrs().with_context(|| format!("{address}: expected host:port"))?;
    let addresses: Vec<_> = addresses.collect();
    if let Some(open) = addresses.iter().find(|a| !a.ip().is_loopback() && terms.secret.is_empty()) {
        anyhow::bail!(
            "{open}: expected a shared secret for an address that others can reach, found none\n  hint: name a file with \
             one, or listen on 127.0.0.1"
        );
    }
    let listener = TcpListener::bind(&addresses[..]).with_context(|| format!("listening on {address}"))?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// Accepts for ever; `serve` makes the task of each client. At most `most` are served at once, further ones wait.
pub async fn accept_each<F: Future<Output = ()> + Send + 'static>(
    listener: TcpListener,
    most: usize,
    serve: impl Fn(TcpStream, SocketAddr) -> F,
) {
    let listener = match tokio::net::TcpListener::from_std(listener) {
        Ok(listener) => listener,
        Err(error) => return tracing::error!("the listening socket cannot be used: {error}"),
    };
    let places = Arc::new(Semaphore::new(most));
    loop {
        let Ok(place) = places.clone().acquire_owned().await else { return };
        match listener.accept().await {
            Ok((stream, peer)) => {
                let served = serve(stream, peer);
                tokio::spawn(async move {
                    let _place = place;
                    served.await;
                });
            }
            Err(error) => {
                // Out of file descriptors, say: not for ever.
                tracing::warn!("a client could not be accepted: {error}");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}
