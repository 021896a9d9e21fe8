//! Any state of an epoch is usable, and refers only to chunks of the disk.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| cairn_backend::fuzzing::epoch(data));
