//! In any segment, the content of each blob that is found matches its id, and no blobs overlap.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let file = tempfile::tempfile_in("/dev/shm").expect("creating a file in memory");
    cairn_store::fuzzing::segment(data, &file);
});
