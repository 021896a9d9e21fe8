//! Whatever the state of an epoch holds: it tells of the disk's chunks alone, and can be used.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| cairn_backend::fuzzing::epoch(data));
