//! The comparison for storing on peers: a copy of the same bytes over one connection into a file.

use std::fs::File;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};

use super::data::CHUNK;
use crate::proc;
use crate::site::Site;

/// Copies the bytes and syncs once at the end. Returns the seconds, and the CPU time of both ends.
pub(crate) fn copy(site: &Site, bytes: &[u8]) -> Result<(f64, Duration)> {
    let area = site.area()?;
    let mut file = File::create(area.path("copy")).context("creating a file")?;
    let listener = TcpListener::bind("127.0.0.1:0").context("listening")?;
    let address = listener.local_addr().context("listening")?;
    let mut buffer = vec![0; CHUNK];
    let before = proc::cpu_time(std::process::id())?;
    let begin = Instant::now();
    let receiver = thread::spawn(move || -> std::io::Result<()> {
        let (mut stream, _) = listener.accept()?;
        loop {
            let len = stream.read(&mut buffer)?;
            if len == 0 {
                return file.sync_data();
            }
            file.write_all(&buffer[..len])?;
        }
    });
    let mut stream = TcpStream::connect(address).context("connecting")?;
    for chunk in bytes.chunks(CHUNK) {
        stream.write_all(chunk).context("sending")?;
    }
    drop(stream);
    let received = receiver.join().map_err(|_| anyhow!("the receiver panicked"))?;
    received.context("receiving")?;
    let seconds = begin.elapsed().as_secs_f64();
    Ok((seconds, proc::cpu_time(std::process::id())? - before))
}
