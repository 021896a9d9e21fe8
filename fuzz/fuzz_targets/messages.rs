//! Whatever a client says: lines are bounded, and a message that is understood is understood again.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| cairn_backend::fuzzing::messages(data));
