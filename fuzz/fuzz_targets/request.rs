//! Whatever a guest puts into its descriptors: the parser answers, in bounds, without a panic.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| cairn_backend::fuzzing::request(data));
