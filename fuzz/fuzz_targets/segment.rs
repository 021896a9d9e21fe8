//! Whatever a segment holds: what is found in it has its name's content, and no two blobs overlap.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let file = tempfile::tempfile_in("/dev/shm").expect("a file in memory");
    cairn_store::fuzzing::segment(data, &file);
});
