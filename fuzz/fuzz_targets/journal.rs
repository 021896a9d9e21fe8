//! For any journal, an epoch is lost, or its copies do not overlap and stay within their space.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| cairn_backend::fuzzing::journal(data));
