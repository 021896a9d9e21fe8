//! For any descriptors of a guest, the parser returns a result within bounds and does not panic.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| cairn_backend::fuzzing::request(data));
