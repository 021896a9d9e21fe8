//! A proxy between the clients and a peer.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;

use crate::lab::Dice;

/// The length of a frame's header in bytes. Its first four bytes are the length of the body.
const HEADER: usize = 16;

/// The kind of the first answer. It is never changed: a client that gets a wrong one stops using
/// the peer.
const WELCOME: u16 = 101;

/// Forwards the messages of clients and a peer, and flips a bit in some answers of the peer.
pub(crate) struct Proxy {
    /// The address for clients.
    pub(crate) address: String,
    shared: Arc<Shared>,
}

struct Shared {
    /// The address of the peer.
    target: Mutex<Option<String>>,
    /// How many of 1000 bodies get a flipped bit.
    permille: AtomicU64,
    flipped: AtomicU64,
    /// Bytes received from clients.
    received: AtomicU64,
    dice: Mutex<Dice>,
}

impl Proxy {
    pub(crate) fn start(seed: u64) -> Proxy {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let shared = Arc::new(Shared {
            target: Mutex::default(),
            permille: AtomicU64::new(0),
            flipped: AtomicU64::new(0),
            received: AtomicU64::new(0),
            dice: Mutex::new(Dice::new(seed)),
        });
        let own = shared.clone();
        // The thread ends with the process.
        thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let shared = own.clone();
                thread::spawn(move || shared.forward(client));
            }
        });
        Proxy { address, shared }
    }

    /// Forwards connections to the peer at `target`.
    pub(crate) fn leads_to(&self, target: &str) {
        *self.shared.target.lock().unwrap() = Some(target.to_owned());
    }

    /// Flips a bit in `permille` of 1000 bodies from here on.
    pub(crate) fn flip(&self, permille: u64) {
        self.shared.permille.store(permille, Ordering::SeqCst);
    }

    /// Bytes received from clients so far.
    pub(crate) fn received(&self) -> u64 {
        self.shared.received.load(Ordering::SeqCst)
    }

    /// Bodies with a flipped bit so far.
    pub(crate) fn flipped(&self) -> u64 {
        self.shared.flipped.load(Ordering::SeqCst)
    }
}

impl Shared {
    fn forward(&self, client: TcpStream) {
        let target = self.target.lock().unwrap().clone();
        let Some(Ok(peer)) = target.map(TcpStream::connect) else { return };
        // Delayed small packets would make the peer 40 ms slower than the others, and its answers
        // would come too late to be used.
        let _ = (client.set_nodelay(true), peer.set_nodelay(true));
        thread::scope(|scope| {
            scope.spawn(|| {
                let _ = self.requests(&client, &peer);
                let _ = peer.shutdown(Shutdown::Both);
            });
            let _ = self.answers(&peer, &client);
            let _ = client.shutdown(Shutdown::Both);
        });
    }

    fn requests(&self, mut client: &TcpStream, mut peer: &TcpStream) -> io::Result<()> {
        let mut buf = vec![0; 1 << 16];
        loop {
            let len = client.read(&mut buf)?;
            if len == 0 {
                return Ok(());
            }
            self.received.fetch_add(len as u64, Ordering::SeqCst);
            peer.write_all(&buf[..len])?;
        }
    }

    fn answers(&self, mut peer: &TcpStream, mut client: &TcpStream) -> io::Result<()> {
        loop {
            let mut frame = vec![0; HEADER];
            peer.read_exact(&mut frame)?;
            let len = u32::from_le_bytes([frame[0], frame[1], frame[2], frame[3]]) as usize;
            frame.resize(HEADER + len, 0);
            peer.read_exact(&mut frame[HEADER..])?;
            let kind = u16::from_le_bytes([frame[4], frame[5]]);
            if len > 0 && kind != WELCOME {
                let mut dice = self.dice.lock().unwrap();
                if dice.below(1000) < self.permille.load(Ordering::SeqCst) {
                    let bit = dice.below(len as u64 * 8) as usize;
                    frame[HEADER + bit / 8] ^= 1 << (bit % 8);
                    self.flipped.fetch_add(1, Ordering::SeqCst);
                }
            }
            client.write_all(&frame)?;
        }
    }
}
