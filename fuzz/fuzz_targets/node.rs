//! Whatever a tree node holds: it is refused, or the one encoding of what it tells.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| cairn_store::fuzzing::node(data));
