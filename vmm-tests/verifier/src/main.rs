//! Runs in a guest. Writes to a disk from many threads, reads the data back, and verifies it.
//!
//! usage: verifier DEVICE THREADS STOP
//!        verifier drop-cache FILE...
//!
//! It runs until the file STOP exists. Then it reads everything and prints `OK` with its counters.
//! At the first error it prints `WRONG` with the reason, and ends.
//!
//! `drop-cache` removes the clean pages of files from the guest's cache, so that the next read comes
//! from the disk. Writing to /proc/sys/vm/drop_caches would do that for all files, but ext4 of Debian's
//! kernel 6.1.192 then fails with a null pointer when it allocates blocks.

use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use seeded_rng::mix;
use verifier::{BLOCK, Writer};

/// Memory that is aligned for direct I/O.
#[repr(C, align(4096))]
struct Page([u8; BLOCK]);

#[derive(Default)]
struct Counts {
    writes: AtomicU64,
    reads: AtomicU64,
    flushes: AtomicU64,
    slowest_us: AtomicU64,
}

/// Removes the clean pages of a file from the cache.
#[allow(unsafe_code)]
fn drop_cache(path: &str) {
    let file = File::open(path).unwrap_or_else(|error| wrong(&format!("{path}: {error}")));
    // SAFETY: the call takes a descriptor that is open, and no memory of this process.
    let error = unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) };
    if error != 0 {
        wrong(&format!("{path}: {}", std::io::Error::from_raw_os_error(error)));
    }
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let [command, files @ ..] = &arguments[..]
        && command == "drop-cache"
    {
        files.iter().for_each(|file| drop_cache(file));
        return;
    }
    let [device, threads, stop] = &arguments[..] else {
        eprintln!("usage: verifier DEVICE THREADS STOP, or verifier drop-cache FILE...");
        std::process::exit(2);
    };
    let threads: u64 = threads.parse().unwrap_or_else(|_| wrong("THREADS is not a number"));
    let options = |flags| {
        let mut options = OpenOptions::new();
        options.read(true).write(true).custom_flags(flags);
        options
    };
    let open = || options(libc::O_DIRECT).open(device);
    let file = open().unwrap_or_else(|error| wrong(&format!("{device}: {error}")));
    let blocks = std::io::Seek::seek(&mut &file, std::io::SeekFrom::End(0));
    let blocks = blocks.unwrap_or_else(|error| wrong(&format!("{device}: {error}"))) / BLOCK as u64;
    let counts = Counts::default();
    std::thread::scope(|scope| {
        for index in 0..threads {
            let writer = Writer { index, writers: threads, blocks };
            let (file, counts) = (&file, &counts);
            scope.spawn(move || run(writer, file, counts, Path::new(stop)));
        }
    });
    let get = |count: &AtomicU64| count.load(Ordering::Relaxed);
    println!(
        "OK {} writes, {} reads, {} flushes, slowest {} ms",
        get(&counts.writes),
        get(&counts.reads),
        get(&counts.flushes),
        get(&counts.slowest_us) / 1000
    );
}

fn wrong(what: &str) -> ! {
    println!("WRONG {what}");
    std::process::exit(1);
}

/// The loop of one thread.
fn run(writer: Writer, file: &File, counts: &Counts, stop: &Path) {
    let mut page = Box::new(Page([0; BLOCK]));
    let mut last = vec![0; writer.own_blocks() as usize];
    let mut number = 0;
    let timed = |what: &str, work: &mut dyn FnMut() -> std::io::Result<()>| {
        let start = Instant::now();
        if let Err(error) = work() {
            wrong(&format!("writer {}: {what}: {error}", writer.index));
        }
        let us = start.elapsed().as_micros() as u64;
        counts.slowest_us.fetch_max(us, Ordering::Relaxed);
    };
    let mut last_check = Instant::now();
    loop {
        // Checking for the file is slow in an emulated guest, so it is done at intervals.
        if last_check.elapsed() > Duration::from_millis(100) {
            last_check = Instant::now();
            if stop.exists() {
                break;
            }
        }
        number += 1;
        let block = writer.block_of(number);
        page.0.copy_from_slice(&writer.content(block, number));
        timed("write", &mut || file.write_all_at(&page.0, block * BLOCK as u64));
        last[(block / writer.writers) as usize] = number;
        counts.writes.fetch_add(1, Ordering::Relaxed);
        let draw = mix(number ^ 0x5eed);
        if draw.is_multiple_of(3) {
            let own = mix(draw) % writer.own_blocks();
            let block = own * writer.writers + writer.index;
            timed("read", &mut || file.read_exact_at(&mut page.0, block * BLOCK as u64));
            expect(&writer, block, &page.0, last[own as usize]);
            counts.reads.fetch_add(1, Ordering::Relaxed);
        }
        if draw.is_multiple_of(16) {
            timed("flush", &mut || file.sync_data());
            counts.flushes.fetch_add(1, Ordering::Relaxed);
        }
    }
    for (own, number) in last.iter().enumerate() {
        let block = own as u64 * writer.writers + writer.index;
        timed("read", &mut || file.read_exact_at(&mut page.0, block * BLOCK as u64));
        expect(&writer, block, &page.0, *number);
    }
}

fn expect(writer: &Writer, block: u64, content: &[u8], number: u64) {
    let found = writer.number(block, content);
    if found != Some(number) {
        wrong(&format!("block {block} has write {found:?} instead of {number}"));
    }
}
