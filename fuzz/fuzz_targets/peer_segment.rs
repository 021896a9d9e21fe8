//! Whatever a peer's segment holds: what is found in it is what was written, and no two fragments overlap.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let file = tempfile::tempfile_in("/dev/shm").expect("a file in memory");
    cairn_store::fuzzing::peer_segment(data, &file);
});
