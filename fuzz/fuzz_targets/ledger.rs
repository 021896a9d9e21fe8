//! In any ledger of requests, each chain is found once, and no chain that the guest does not wait
//! for.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| cairn_backend::fuzzing::ledger(data));
