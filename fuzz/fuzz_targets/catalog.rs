//! Whatever a catalog or its client says: it is refused, or is a message with one form.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| cairn_store::fuzzing::catalog(data));
