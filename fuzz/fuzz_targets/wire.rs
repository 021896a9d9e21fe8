//! Any message of a peer or its client is refused, or has exactly one encoding.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| cairn_store::fuzzing::wire(data));
