//! Whatever the mirror's map holds: it is refused, or tells of the disk alone and can be written again.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| cairn_backend::fuzzing::map(data));
