//! For any table and any owners of memory, a layer is lost, or its copies stay within their space.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| cairn_backend::fuzzing::copies(data));
