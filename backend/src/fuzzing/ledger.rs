//! The requests in flight, as an earlier process or the hypervisor left them.

use std::collections::BTreeSet;
use std::fs::File;
use std::os::unix::fs::FileExt;

use super::{file_of, flip, path_of, take};
use crate::guest::ledger::{GuestRingAddresses, Ledger, LedgerFile, LedgerRegion, RingIndices};
use crate::mapping::PAGE_BYTES;

const QUEUES: usize = 2;
const ENTRIES: u16 = 16;

/// The queue that is resumed.
const QUEUE: usize = 1;

/// The addresses of its ring.
const ADDRESSES: GuestRingAddresses =
    GuestRingAddresses { descriptors: 0x1000, available: 0x2000, used: 0x3000 };

/// Flips bits in the ledgers of a device with two queues, and resumes the second one. The first
/// bytes are its size, the ring's indices, and how far the ledger is behind them.
pub fn ledger(mut data: &[u8]) {
    let [how] = take(&mut data);
    let size = 1 << (how % 5);
    let available = u16::from_le_bytes(take(&mut data));
    let used = u16::from_le_bytes(take(&mut data));
    let ring = RingIndices { available, used };
    let len = LedgerRegion::len(QUEUES, ENTRIES);
    let mut bytes = vec![0; PAGE_BYTES / 8 + len as usize];
    let (places, ledgers) = bytes.split_at_mut(PAGE_BYTES / 8);
    let place = [ADDRESSES.descriptors, ADDRESSES.available, ADDRESSES.used, u64::from(size)];
    places[QUEUE * 32..][..32].copy_from_slice(&place.map(u64::to_le_bytes).concat());
    let behind = used.wrapping_sub(u16::from(how >> 7));
    let header = [1, size, 0, behind].map(u16::to_le_bytes).concat();
    ledgers[QUEUE * len as usize / QUEUES + 8..][..8].copy_from_slice(&header);
    flip(&mut bytes, data);
    let (places, ledgers) = bytes.split_at(PAGE_BYTES / 8);
    let file = file_of(PAGE_BYTES as u64 + len, &[(0, places), (PAGE_BYTES as u64, ledgers)]);
    let other = other_queue(&file);
    if how & 0x20 == 0 {
        let region = LedgerRegion::map(&file, PAGE_BYTES as u64, QUEUES, ENTRIES)
            .expect("it is long enough");
        assert!(region.ledger(QUEUES, size).is_none() && region.ledger(0, ENTRIES + 1).is_none());
        check(size, ring, |ring| {
            let mut ledger = region.ledger(QUEUE, size).expect("there is one");
            let heads = ledger.resume(ring);
            (ledger, heads)
        });
    } else {
        let other_len = how & 0x40 != 0;
        if other_len {
            file.set_len(PAGE_BYTES as u64 + len + 1).expect("memory");
        }
        let own = LedgerFile::open(&path_of(&file), QUEUES, ENTRIES).expect("memory");
        let resume = |ring| own.resume(QUEUE, size, ADDRESSES, ring).expect("there is one");
        // While no chain was returned, the ring tells what is in flight, and not the ledger.
        let heads = match ring.used {
            0 => resume(ring).1,
            _ => check(size, ring, resume),
        };
        assert!(!other_len || heads.is_none(), "a file for other queues tells nothing");
        if other_len {
            return;
        }
    }
    assert_eq!(other_queue(&file), other, "the other queue's is not touched");
}

/// The bytes of the other queue.
fn other_queue(file: &File) -> Vec<u8> {
    let mut bytes = vec![0; LedgerRegion::len(1, ENTRIES) as usize];
    file.read_exact_at(&mut bytes, PAGE_BYTES as u64).expect("it is long enough");
    bytes
}

fn check(
    size: u16,
    ring: RingIndices,
    resume: impl Fn(RingIndices) -> (Ledger, Option<Vec<u16>>),
) -> Option<Vec<u16>> {
    let waiting = ring.available.wrapping_sub(ring.used);
    let (_, found) = resume(ring);
    let heads = found.clone().unwrap_or_default();
    let set: BTreeSet<u16> = heads.iter().copied().collect();
    assert!(set.iter().all(|head| *head < size));
    assert_eq!(set.len(), heads.len(), "no chain is served twice");
    assert!(heads.len() <= usize::from(waiting), "no more than the guest waits for");
    let (mut ledger, again) = resume(ring);
    assert_eq!(again, Some(heads), "the next process finds the same");
    // Chains that come and go from here on are found as in any other ledger.
    let Some(head) = (0..size).find(|head| !set.contains(head)).filter(|_| waiting < size) else {
        return found;
    };
    let ring = RingIndices { available: ring.available.wrapping_add(1), ..ring };
    ledger.popped(head);
    let as_set = |heads: Option<Vec<u16>>| BTreeSet::from_iter(heads.expect("it fits the ring"));
    let more = &set | &BTreeSet::from([head]);
    assert_eq!(as_set(resume(ring).1), more);
    let next = RingIndices { used: ring.used.wrapping_add(1), ..ring };
    ledger.returning(head, ring.used);
    assert_eq!(as_set(resume(ring).1), more, "the guest has not seen it");
    ledger.returning(head, ring.used);
    assert_eq!(as_set(resume(next).1), set, "the guest has seen it");
    ledger.returned(head, next.used);
    assert_eq!(as_set(resume(next).1), set);
    found
}
