//! Whatever the journal holds: an epoch is lost, or its copies lie apart and inside of their room.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| cairn_backend::fuzzing::journal(data));
