//! Servers for the documents of a repository. Each is a real one, and empty at first.

use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use cairn_store::documents;
use cairn_store::documents::{CatalogStore, Documents, remote};
use cairn_store::net::identity::Security;
use tempfile::TempDir;

/// How long a server may take to start.
const START_TIMEOUT: Duration = Duration::from_secs(60);

/// A server of documents. An etcd ends when this is dropped.
pub(crate) struct DocumentServer {
    address: String,
    child: Option<Child>,
    _dir: TempDir,
}

impl DocumentServer {
    /// A catalog as `cairn serve --catalog` serves it.
    pub(crate) fn catalog() -> DocumentServer {
        let dir = TempDir::new().unwrap();
        let store = Arc::new(CatalogStore::open(dir.path()).unwrap());
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        listener.set_nonblocking(true).unwrap();
        // The thread ends with the process.
        thread::spawn(move || {
            runtime.block_on(async {
                let listener = tokio::net::TcpListener::from_std(listener).unwrap();
                let never = std::future::pending();
                remote::serve(listener, store, Security::INSECURE, never).await.unwrap();
            });
        });
        DocumentServer { address, child: None, _dir: dir }
    }

    /// An etcd of one member.
    pub(crate) fn etcd() -> DocumentServer {
        for _ in 0..20 {
            let dir = TempDir::new().unwrap();
            let [own, other] = [(), ()].map(|()| format!("127.0.0.1:{}", free_port()));
            let mut child = spawn_etcd(&dir, &format!("http://{own}"), &format!("http://{other}"));
            let begin = Instant::now();
            // etcd exits if one of its ports is in use.
            while child.try_wait().unwrap().is_none() {
                if TcpStream::connect(&own).is_ok() {
                    let address = format!("etcd://{own}");
                    let server = DocumentServer { address, child: Some(child), _dir: dir };
                    // etcd listens before it answers.
                    while let Err(error) = server.documents().read(&[]) {
                        assert!(
                            begin.elapsed() < 3 * START_TIMEOUT,
                            "etcd does not answer: {error}"
                        );
                    }
                    return server;
                }
                assert!(begin.elapsed() < START_TIMEOUT, "etcd does not listen");
                thread::sleep(Duration::from_millis(20));
            }
        }
        panic!("etcd does not start");
    }

    pub(crate) fn address(&self) -> &str {
        &self.address
    }

    /// A client of the server.
    pub(crate) fn documents(&self) -> Arc<dyn Documents> {
        documents::open(&self.address, &Security::INSECURE).unwrap()
    }
}

impl Drop for DocumentServer {
    fn drop(&mut self) {
        if let Some(child) = &mut self.child {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// A free port, below the range from which the system assigns ports.
fn free_port() -> u16 {
    use std::hash::{BuildHasher, RandomState};
    let random = || 10_000 + (RandomState::new().hash_one(0) % 22_000) as u16;
    let is_free = |port: &u16| std::net::TcpListener::bind(("127.0.0.1", *port)).is_ok();
    (0..100).map(|_| random()).find(is_free).expect("a port is free")
}

fn spawn_etcd(dir: &TempDir, own: &str, other: &str) -> Child {
    let spawned = Command::new("etcd")
        .arg("--data-dir")
        .arg(dir.path().join("data"))
        .args(["--listen-client-urls", own, "--advertise-client-urls", own])
        .args(["--listen-peer-urls", other, "--initial-advertise-peer-urls", other])
        .args(["--initial-cluster", &format!("default={other}")])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn();
    spawned.expect("etcd cannot be started; `make setup` installs it")
}

/// Declares a test for each of these functions with each document store.
macro_rules! for_each_document_store {
    ($($test:ident),+ $(,)?) => {
        mod sqlite {
            use crate::support::TestRepository;
            $(#[test] fn $test() { super::$test(&TestRepository::new()); })+
        }
        mod remote {
            use crate::documents::DocumentServer;
            use crate::support::TestRepository;
            $(#[test] fn $test() {
                super::$test(&TestRepository::with(DocumentServer::catalog()));
            })+
        }
        mod etcd {
            use crate::documents::DocumentServer;
            use crate::support::TestRepository;
            $(#[test] fn $test() {
                super::$test(&TestRepository::with(DocumentServer::etcd()));
            })+
        }
    };
}
pub(crate) use for_each_document_store;
