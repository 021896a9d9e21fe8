//! Any map of the mirror is refused, or refers only to the disk and can be written again.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| cairn_backend::fuzzing::map(data));
