//! For any input of a client, lines are bounded, and a parsed message can be encoded and parsed
//! again.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| cairn_backend::fuzzing::messages(data));
