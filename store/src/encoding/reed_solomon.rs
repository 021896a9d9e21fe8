//! The Reed-Solomon code: GF(2⁸) with a systematic Vandermonde matrix.
//!
//! The C code of `reed-solomon-erasure` is compiled for Haswell (AVX2), whatever the processor is.
//! It is used only if the processor has these instructions. Otherwise a loop in Rust is used, which
//! is much slower and gives the same blocks.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex};

use reed_solomon_erasure::{Field, ReedSolomon, galois_8};

/// A code for a number of data and parity blocks.
pub(crate) type Code = ReedSolomon<Portable>;

/// The field GF(2⁸), on any processor.
#[derive(Debug)]
pub(crate) struct Portable;

/// Whether the processor has the instructions that the C code is compiled for (Haswell).
#[cfg(target_arch = "x86_64")]
static FAST: LazyLock<bool> = LazyLock::new(|| {
    let fast = std::arch::is_x86_feature_detected!("avx2")
        && std::arch::is_x86_feature_detected!("bmi1")
        && std::arch::is_x86_feature_detected!("bmi2")
        && std::arch::is_x86_feature_detected!("fma")
        && std::arch::is_x86_feature_detected!("lzcnt")
        && std::arch::is_x86_feature_detected!("movbe");
    if !fast {
        tracing::warn!("this processor has no AVX2: Reed-Solomon codes are slow; use replicas");
    }
    fast
});

/// On other architectures the C code is compiled for every processor.
#[cfg(not(target_arch = "x86_64"))]
static FAST: LazyLock<bool> = LazyLock::new(|| true);

impl Field for Portable {
    const ORDER: usize = <galois_8::Field as Field>::ORDER;
    type Elem = u8;

    fn add(a: u8, b: u8) -> u8 {
        galois_8::add(a, b)
    }

    fn mul(a: u8, b: u8) -> u8 {
        galois_8::mul(a, b)
    }

    fn div(a: u8, b: u8) -> u8 {
        galois_8::div(a, b)
    }

    fn exp(a: u8, n: usize) -> u8 {
        galois_8::exp(a, n)
    }

    fn zero() -> u8 {
        0
    }

    fn one() -> u8 {
        1
    }

    fn nth_internal(n: usize) -> u8 {
        n as u8
    }

    fn mul_slice(factor: u8, input: &[u8], out: &mut [u8]) {
        match *FAST {
            true => <galois_8::Field as Field>::mul_slice(factor, input, out),
            false => multiply::<false>(factor, input, out),
        }
    }

    fn mul_slice_add(factor: u8, input: &[u8], out: &mut [u8]) {
        match *FAST {
            true => <galois_8::Field as Field>::mul_slice_add(factor, input, out),
            false => multiply::<true>(factor, input, out),
        }
    }
}

/// Multiplies each byte of `input` with `factor`. Adds the product to `out` if `ADD`, otherwise
/// replaces `out`.
fn multiply<const ADD: bool>(factor: u8, input: &[u8], out: &mut [u8]) {
    assert_eq!(input.len(), out.len(), "all blocks have the same length");
    let table: [u8; 256] = std::array::from_fn(|byte| galois_8::mul(factor, byte as u8));
    for (input, out) in input.iter().zip(out) {
        *out = table[usize::from(*input)] ^ if ADD { *out } else { 0 };
    }
}

/// The code for these numbers of blocks. Codes are cached, because creating one is slow.
pub(crate) fn code(data: u8, parity: u8) -> Arc<Code> {
    type Codes = HashMap<(u8, u8), Arc<Code>>;
    static CODES: LazyLock<Mutex<Codes>> = LazyLock::new(Mutex::default);
    let mut codes = CODES.lock().expect("no code panics with the codes locked");
    let code = codes.entry((data, parity)).or_insert_with(|| {
        let code = Code::new(data.into(), parity.into());
        Arc::new(code.expect("a code has 2 to 32 blocks"))
    });
    code.clone()
}

/// Bytes of each block that are encoded at a time. The stripes of all data and parity blocks fit
/// into the first-level cache.
const STRIPE_BYTES: usize = 2048;

/// Computes the parity blocks. All blocks have the same length.
///
/// # Panics
///
/// If the number of blocks is not that of the code.
pub(crate) fn encode(code: &Code, data: &[&[u8]], parity: &mut [&mut [u8]]) {
    let len = data.first().map_or(0, |block| block.len());
    for start in (0..len).step_by(STRIPE_BYTES) {
        let part = start..(start + STRIPE_BYTES).min(len);
        let data: Vec<_> = data.iter().map(|block| &block[part.clone()]).collect();
        let mut parity: Vec<_> = parity.iter_mut().map(|block| &mut block[part.clone()]).collect();
        code.encode_sep(&data, &mut parity).expect("the code has this number of blocks");
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::{any, prop_assert_eq, proptest};

    use super::{Field, STRIPE_BYTES, code, encode, galois_8, multiply};

    proptest! {
        #[test]
        fn the_portable_code_gives_the_same_result_as_the_fast_code(
            factor in any::<u8>(),
            input in vec(any::<u8>(), 1..300),
        ) {
            let mut fast = vec![7; input.len()];
            let mut portable = fast.clone();
            <galois_8::Field as Field>::mul_slice_add(factor, &input, &mut fast);
            multiply::<true>(factor, &input, &mut portable);
            prop_assert_eq!(&fast, &portable);
            <galois_8::Field as Field>::mul_slice(factor, &input, &mut fast);
            multiply::<false>(factor, &input, &mut portable);
            prop_assert_eq!(fast, portable);
        }

        #[test]
        fn encoding_in_stripes_gives_the_same_result(
            len in 1usize..3 * STRIPE_BYTES,
            seed in any::<u8>(),
        ) {
            let block = |number: u8| {
                let mut block = vec![0; len];
                blake3::Hasher::new().update(&[seed, number]).finalize_xof().fill(&mut block);
                block
            };
            let data: Vec<_> = (0..3).map(block).collect();
            let (mut whole, mut stripes) = (vec![vec![1; len]; 2], vec![vec![2; len]; 2]);
            let code = code(3, 2);
            code.encode_sep(&data, &mut whole).unwrap();
            let data: Vec<&[u8]> = data.iter().map(|block| &block[..]).collect();
            let mut parity: Vec<_> = stripes.iter_mut().map(|block| &mut block[..]).collect();
            encode(&code, &data, &mut parity);
            prop_assert_eq!(whole, stripes);
        }
    }
}
