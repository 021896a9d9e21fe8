use proptest::prelude::{any, prop};
use proptest::{prop_assert, prop_assert_eq, proptest};
use virtio_queue::desc::{RawDescriptor, split};
use virtio_queue::{Queue, QueueOwnedT, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use super::{
    Descriptor, Descriptors, MAX_DESCRIPTORS, MAX_SEGMENTS, Parsed, Refused, RequestKind, Segment,
    parse,
};

const MEMORY: usize = 1 << 20;
const HEADER: u64 = 0x1000;
const DATA: u64 = 0x8000;
const STATUS: u64 = 0x2000;

fn memory() -> GuestMemoryMmap {
    GuestMemoryMmap::from_ranges(&[(GuestAddress(0), MEMORY)]).unwrap()
}

fn header(memory: &GuestMemoryMmap, kind: u32, sector: u64) {
    memory.write_obj(kind, GuestAddress(HEADER)).unwrap();
    memory.write_obj(sector, GuestAddress(HEADER + 8)).unwrap();
}

fn read_only(address: u64, len: u32) -> Descriptor {
    Descriptor { segment: Segment { address, len }, writable: false }
}

fn write_only(address: u64, len: u32) -> Descriptor {
    Descriptor { segment: Segment { address, len }, writable: true }
}

fn run(chain: &[Descriptor], memory: &GuestMemoryMmap) -> Option<Parsed> {
    parse(chain.iter().copied(), memory)
}

#[test]
fn a_read_has_a_header_data_and_a_status() {
    let memory = memory();
    header(&memory, 0, 77);
    let chain = [read_only(HEADER, 16), write_only(DATA, 4096), write_only(STATUS, 1)];
    let parsed = run(&chain, &memory).unwrap();
    assert_eq!(parsed.status, GuestAddress(STATUS));
    let data = vec![Segment { address: DATA, len: 4096 }];
    assert_eq!(parsed.request, Ok(RequestKind::Read { sector: 77, data, len: 4096 }));
}

#[test]
fn the_guest_may_cut_a_request_into_descriptors_as_it_likes() {
    let memory = memory();
    header(&memory, 1, 5);
    memory.write_slice(&[0; 512], GuestAddress(HEADER + 16)).unwrap();
    let chain = [
        read_only(HEADER, 7),
        read_only(HEADER + 7, 9 + 100),
        read_only(DATA, 412),
        write_only(STATUS, 1),
    ];
    let parsed = run(&chain, &memory).unwrap();
    let data =
        vec![Segment { address: HEADER + 16, len: 100 }, Segment { address: DATA, len: 412 }];
    assert_eq!(parsed.request, Ok(RequestKind::Write { sector: 5, data, len: 512 }));
    // Data and status in one descriptor.
    header(&memory, 0, 5);
    let parsed = run(&[read_only(HEADER, 16), write_only(DATA, 513)], &memory).unwrap();
    assert_eq!(parsed.status, GuestAddress(DATA + 512));
    assert!(matches!(parsed.request, Ok(RequestKind::Read { len: 512, .. })));
}

#[test]
fn a_chain_without_a_place_for_the_status_is_no_request() {
    let memory = memory();
    header(&memory, 0, 0);
    assert_eq!(run(&[], &memory), None);
    assert_eq!(run(&[read_only(HEADER, 16), read_only(DATA, 512)], &memory), None);
    let beyond = MEMORY as u64;
    assert_eq!(run(&[read_only(HEADER, 16), write_only(beyond, 1)], &memory), None);
    assert_eq!(run(&[read_only(HEADER, 16), write_only(u64::MAX, 2)], &memory), None);
}

#[test]
fn wrong_shapes_are_invalid_and_unknown_kinds_unsupported() {
    let memory = memory();
    let refusal = |kind: u32, chain: &[Descriptor]| {
        header(&memory, kind, 0);
        run(chain, &memory).unwrap().request.unwrap_err()
    };
    let status = write_only(STATUS, 1);
    assert_eq!(refusal(0, &[read_only(HEADER, 15), status]), Refused::Invalid);
    assert_eq!(refusal(0, &[read_only(HEADER, 16), status]), Refused::Invalid, "no data");
    assert_eq!(
        refusal(0, &[read_only(HEADER, 16), write_only(DATA, 100), status]),
        Refused::Invalid
    );
    assert_eq!(
        refusal(1, &[read_only(HEADER, 16), write_only(DATA, 512), status]),
        Refused::Invalid,
        "a write whose data is for the device to write"
    );
    assert_eq!(
        refusal(0, &[write_only(DATA, 512), read_only(HEADER, 16), status]),
        Refused::Invalid,
        "out of order"
    );
    assert_eq!(refusal(99, &[read_only(HEADER, 16), status]), Refused::Unsupported);
    assert_eq!(
        refusal(11, &[read_only(HEADER, 16), read_only(DATA, 32), status]),
        Refused::Invalid,
        "two ranges in a discard"
    );
    memory.write_obj(0xffu32, GuestAddress(DATA + 12)).unwrap();
    assert_eq!(
        refusal(13, &[read_only(HEADER, 16), read_only(DATA, 16), status]),
        Refused::Unsupported,
        "reserved flags"
    );
}

#[test]
fn a_chain_that_is_longer_than_any_request_is_not_read_to_its_end() {
    let memory = memory();
    header(&memory, 0, 0);
    let parse_long = |data: usize, empty: usize| {
        let mut seen = 0;
        let chain = [read_only(HEADER, 16)]
            .into_iter()
            .chain(std::iter::repeat_n(write_only(DATA, 512), data))
            .chain(std::iter::repeat_n(write_only(DATA, 0), empty))
            .chain([write_only(STATUS, 1)])
            .inspect(|_| seen += 1);
        let parsed = parse(chain, &memory);
        (parsed, seen)
    };
    let (parsed, _) = parse_long(MAX_SEGMENTS, 0);
    assert!(matches!(parsed.unwrap().request, Ok(RequestKind::Read { .. })));
    let (parsed, _) = parse_long(MAX_SEGMENTS + 1, 0);
    assert_eq!(parsed.unwrap().request, Err(Refused::Invalid));
    for (data, empty) in [(65000, 0), (1, 65000)] {
        let (parsed, seen) = parse_long(data, empty);
        assert_eq!((parsed, seen), (None, MAX_DESCRIPTORS + 1));
    }
}

proptest! {
    /// Any table, with any head, is walked as `virtio-queue` walks it.
    #[test]
    fn a_chain_is_walked_as_the_library_does(
        entries in prop::collection::vec(
            (
                prop::sample::select(vec![0u64, 0x1000, 0x1010, 0x3000, MEMORY as u64 - 16, u64::MAX - 7]),
                prop::sample::select(vec![0u32, 1, 16, 17, 48, 160, 4096, 65536 * 16, u32::MAX]),
                0u16..8,
                0u16..18,
            ),
            32,
        ),
        head in 0u16..18,
    ) {
        let (memory, table, size) = (memory(), 0x1000, 16);
        for (at, (address, len, flags, next)) in (table..).step_by(16).zip(entries) {
            let entry = RawDescriptor::from(split::Descriptor::new(address, len, flags, next));
            memory.write_obj(entry, GuestAddress(at)).unwrap();
        }
        memory.write_obj(1u16, GuestAddress(0x8002)).unwrap();
        memory.write_obj(head, GuestAddress(0x8004)).unwrap();
        let mut queue = Queue::new(size).unwrap();
        queue.set_desc_table_address(Some(table as u32), Some(0));
        queue.set_avail_ring_address(Some(0x8000), Some(0));
        queue.set_ready(true);
        let expected: Vec<_> = queue
            .iter(&memory)
            .unwrap()
            .next()
            .unwrap()
            .map(|one| (one.addr().0, one.len(), one.is_write_only()))
            .collect();
        let found: Vec<_> = Descriptors::new(&memory, GuestAddress(table), size, head)
            .map(|one| (one.segment.address, one.segment.len, one.writable))
            .collect();
        prop_assert_eq!(found, expected);
    }

    /// For any chain and any memory there is an answer and no panic, and accepted requests are
    /// within bounds.
    #[test]
    fn any_chain_gets_an_answer(
        bytes in prop::collection::vec(any::<u8>(), 64),
        kind in prop::sample::select(vec![0u32, 1, 4, 8, 11, 13, 14, 77]),
        chain in prop::collection::vec(
            (prop::sample::select(vec![0, HEADER, HEADER + 3, DATA, MEMORY as u64 - 8, u64::MAX - 3]), 0u32..5000, any::<bool>()),
            0..8,
        ),
    ) {
        let memory = memory();
        memory.write_slice(&bytes, GuestAddress(HEADER)).unwrap();
        memory.write_obj(kind, GuestAddress(HEADER)).unwrap();
        let chain: Vec<Descriptor> = chain
            .into_iter()
            .map(|(address, len, writable)| Descriptor { segment: Segment { address, len }, writable })
            .collect();
        if let Some(Parsed { request: Ok(RequestKind::Read { len, data, .. } | RequestKind::Write { len, data, .. }), .. }) = run(&chain, &memory) {
            prop_assert!(len % 512 == 0 && len > 0);
            prop_assert!(data.iter().map(|segment| u64::from(segment.len)).sum::<u64>() == len);
        }
    }
}
