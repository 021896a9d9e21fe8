//! In any segment of a peer, the fragments that are found are those that were written, and none
//! overlap.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let file = tempfile::tempfile_in("/dev/shm").expect("creating a file in memory");
    cairn_store::fuzzing::peer_segment(data, &file);
});
