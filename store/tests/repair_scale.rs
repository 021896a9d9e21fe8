//! The scan of a repair at scale: very many blobs, in bounded memory, with little traffic.
//!
//! The peers are simulated: each computes its list when it is asked for a page, and holds nothing. The
//! names go through the same sort, and the lists through the same merge and the same plans, as in a
//! real repair. Bytes are counted as the protocol encodes them, with the headers of its frames.
//!
//! `CAIRN_SCALE_BLOBS` sets the number of blobs: `make soak` runs with 10 million. The test is alone in
//! its process, whose memory it measures.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use cairn_store::cluster::placement::{Candidate, rank};
use cairn_store::cluster::protocol::{Answer, FragmentId, Held, Request};
use cairn_store::cluster::repair::{
    PeerState, Peers, RepairLimits, RepairMembers, RepairPeer, Report, Wanted, repair,
};
use cairn_store::encoding::fragment::{Fragment, Kind};
use cairn_store::encoding::{Redundancy, Seal, SealKeys};
use cairn_store::maintenance::{SortedWanted, WantedBlobs};
use cairn_store::{BlobId, PeerId, Result};
use tokio::sync::mpsc;

const PEERS: usize = 12;
const COPIES: usize = 3;

/// The most resident memory of the process.
const MAX_MEMORY: u64 = 256 << 20;

/// The most bytes on the wire for each copy of each blob.
const MAX_BYTES_PER_COPY: f64 = 96.0;

/// The length of a frame's header.
const HEADER: u64 = 16;

/// Blobs whose places are computed at a time.
const BLOCK: u64 = 4096;

/// The names of all blobs, in their order, computed from their numbers.
#[derive(Clone, Copy)]
struct Names {
    count: u64,
}

fn mix(number: u64) -> u64 {
    let mut mixed = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

impl Names {
    /// The distance between two names, in their first eight bytes.
    fn step(self) -> u64 {
        u64::MAX / (self.count + 1)
    }

    fn name(self, number: u64) -> BlobId {
        let first = (number + 1) * self.step() + mix(number) % self.step();
        let rest = [mix(first), mix(first ^ 1), mix(first ^ 2)];
        let all = [first, rest[0], rest[1], rest[2]].map(u64::to_be_bytes).concat();
        BlobId::from_bytes(all.try_into().expect("32 bytes"))
    }

    /// The number of the first name after `after`.
    fn first_after(self, after: &BlobId) -> u64 {
        let prefix = u64::from_be_bytes(*after.as_bytes().first_chunk().expect("32 bytes"));
        let mut number = (prefix / self.step()).saturating_sub(2);
        while number < self.count && self.name(number) <= *after {
            number += 1;
        }
        number
    }
}

/// Peers that hold every blob at its places, and nothing else.
struct Simulated {
    names: Names,
    candidates: Vec<Candidate>,
    /// The places of the blobs of some blocks. All peers list about the same names at a time.
    places: Mutex<BTreeMap<u64, Arc<Vec<[u8; COPIES]>>>>,
    bytes: AtomicU64,
    pages: AtomicU64,
    questions: AtomicU64,
}

impl Simulated {
    fn new(count: u64) -> Simulated {
        let candidate = |number: u8| Candidate {
            id: PeerId::from_bytes([number; 16]),
            weight: 1,
            domain: number.to_string(),
        };
        Simulated {
            names: Names { count },
            candidates: (0..PEERS as u8).map(candidate).collect(),
            places: Mutex::default(),
            bytes: AtomicU64::new(0),
            pages: AtomicU64::new(0),
            questions: AtomicU64::new(0),
        }
    }

    /// The places of the blobs of a block.
    fn places(&self, block: u64) -> Arc<Vec<[u8; COPIES]>> {
        let mut known = self.places.lock().unwrap();
        if let Some(places) = known.get(&block) {
            return places.clone();
        }
        let numbers = block * BLOCK..((block + 1) * BLOCK).min(self.names.count);
        let places = numbers.map(|number| {
            let ranked = rank(&self.names.name(number), &self.candidates);
            std::array::from_fn(|at| ranked[at] as u8)
        });
        let places = Arc::new(places.collect::<Vec<_>>());
        // A scan begins with the first block, and does not go back far.
        known.retain(|one, _| block.abs_diff(*one) < 64);
        known.insert(block, places.clone());
        places
    }

    fn page(&self, peer: u8, after: &BlobId, most: usize) -> Vec<(BlobId, Held)> {
        let mut page = Vec::new();
        let mut number = self.names.first_after(after);
        while number < self.names.count && page.len() < most {
            let places = self.places(number / BLOCK);
            let in_block = &places[(number % BLOCK) as usize..];
            for places in in_block.iter().take(most.saturating_sub(page.len()).max(1) * 8) {
                if page.len() < most && places.contains(&peer) {
                    let blob = self.names.name(number);
                    let encoding = BlobId::from_bytes([blob.as_bytes()[31]; 32]);
                    let (data, parity, index, kind) = (1, 0, 0, Kind::Content);
                    let len = 200_000;
                    let seal = Seal::NONE;
                    page.push((blob, Held { encoding, data, parity, index, kind, len, seal }));
                }
                if page.len() == most {
                    break;
                }
                number += 1;
            }
        }
        page
    }
}

impl Peers for Simulated {
    fn seals(&self) -> &SealKeys {
        &SealKeys::OFF
    }

    async fn have(&self, _: PeerId, blobs: &[BlobId]) -> Result<Vec<Vec<Held>>> {
        self.questions.fetch_add(blobs.len() as u64, Ordering::Relaxed);
        Ok(vec![Vec::new(); blobs.len()])
    }

    async fn list(&self, peer: PeerId, after: BlobId, most: usize) -> Result<Vec<(BlobId, Held)>> {
        let page = self.page(peer.as_bytes()[0], &after, most);
        let (_, request) = Request::List { after, most: most as u16 }.to_body();
        let answer = Answer::Listed(page);
        let (_, body) = answer.to_body();
        let bytes = 2 * HEADER + (request.len() + body.len()) as u64;
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
        self.pages.fetch_add(1, Ordering::Relaxed);
        let Answer::Listed(page) = answer else { unreachable!("it was a page") };
        Ok(page)
    }

    async fn get(&self, _: PeerId, _: FragmentId) -> Result<Option<Fragment>> {
        unreachable!("nothing is read")
    }

    async fn put(&self, _: PeerId, _: Fragment) -> Result<()> {
        unreachable!("nothing is written")
    }

    async fn delete(&self, _: PeerId, _: &[FragmentId], _: u32) -> Result<u64> {
        unreachable!("nothing is deleted")
    }
}

/// The most memory that was resident so far, in bytes.
fn peak_memory() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmHWM:")).unwrap();
    let kib: u64 = line.split_whitespace().nth(1).unwrap().parse().unwrap();
    kib << 10
}

/// Sorts the names of all blobs. They come in no order, and every tenth of them twice.
fn wanted(names: Names) -> SortedWanted {
    let mut wanted = WantedBlobs::new();
    // A prime that does not divide the count visits all numbers.
    const STRIDE: u64 = 1_000_000_007;
    assert_ne!(names.count % STRIDE, 0);
    for at in 0..names.count {
        let blob =
            names.name((u128::from(at) * u128::from(STRIDE) % u128::from(names.count)) as u64);
        wanted.add(&Wanted::content(blob, Redundancy::Replicas(COPIES as u8)));
        if at % 10 == 0 {
            wanted.add(&Wanted::content(blob, Redundancy::Replicas(2)));
        }
    }
    wanted.finish().unwrap()
}

/// Repairs with these peers, of which the last ones are down. Returns the report and the number of
/// blobs that it named as short.
fn run(simulated: &Arc<Simulated>, wanted: &SortedWanted, down: usize) -> (Report, u64) {
    let nodes = simulated.candidates.iter().enumerate().map(|(at, candidate)| RepairPeer {
        id: candidate.id,
        weight: candidate.weight,
        domain: candidate.domain.clone(),
        state: if at >= PEERS - down { PeerState::Down } else { PeerState::Up },
        full: false,
    });
    let members = RepairMembers::new(nodes);
    let short = Mutex::new(WantedBlobs::new());
    let progress = |report: &Report| {
        let mut short = short.lock().unwrap();
        let names = report.newly_short().iter();
        names.for_each(|blob| short.add(&Wanted::content(*blob, Redundancy::NONE)));
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let report = runtime.block_on(async {
        let (queue, blobs) = mpsc::channel(4096);
        let feed = async move {
            for wanted in wanted.read().unwrap() {
                queue.send(wanted.unwrap()).await.unwrap();
            }
        };
        let limits = RepairLimits::default();
        let repair = repair(simulated.clone(), members, blobs, limits, &|| true, &progress);
        tokio::join!(feed, repair).1
    });
    let short = short.into_inner().unwrap().finish().unwrap();
    let short = short.read().unwrap().map(Result::unwrap).count() as u64;
    (report, short)
}

#[test]
fn the_scan_of_very_many_blobs_takes_bounded_memory_and_little_traffic() {
    let count = std::env::var("CAIRN_SCALE_BLOBS");
    let count = count.map_or(20_000, |text| text.parse().expect("a number of blobs"));
    let simulated = Arc::new(Simulated::new(count));
    let start = Instant::now();
    let wanted = wanted(simulated.names);
    println!("{count} names sorted after {:?}, {} MiB", start.elapsed(), peak_memory() >> 20);

    let (report, short) = run(&simulated, &wanted, 0);
    let bytes = simulated.bytes.swap(0, Ordering::Relaxed);
    let per_copy = bytes as f64 / (count * COPIES as u64) as f64;
    let pages = simulated.pages.load(Ordering::Relaxed);
    println!(
        "all peers up: {:?}, {} MiB, {bytes} bytes in {pages} pages, {per_copy:.2} per blob and copy",
        start.elapsed(),
        peak_memory() >> 20
    );
    assert_eq!((report.blobs, report.under, report.left, short), (count, 0, 0, 0), "{report:?}");
    assert_eq!((report.survives, report.is_incomplete()), (Some(2), false), "{report:?}");
    assert!(per_copy <= MAX_BYTES_PER_COPY, "{per_copy} bytes for each copy of a blob");

    // A quarter of the blobs has a copy on the peer that is down.
    let (report, short) = run(&simulated, &wanted, 1);
    println!(
        "one peer down: {:?}, {} MiB, {short} blobs are short",
        start.elapsed(),
        peak_memory() >> 20
    );
    assert_eq!((report.blobs, report.under, report.left), (count, short, short), "{report:?}");
    assert!(short > count / 5 && short < count / 3, "{short} of {count}");
    assert!(report.is_settled() && report.waiting == short, "{report:?}");

    assert_eq!(simulated.questions.load(Ordering::Relaxed), 0, "peers were asked about blobs");
    assert!(peak_memory() <= MAX_MEMORY, "{} MiB", peak_memory() >> 20);
}
