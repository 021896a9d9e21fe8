//! Any tree node is refused, or is the only encoding of its content.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| cairn_store::fuzzing::node(data));
