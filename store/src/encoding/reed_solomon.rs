//! The Reed-Solomon code: GF(2⁸) with a systematic Vandermonde matrix.
//!
//! `reed-solomon-erasure` multiplies with instructions of AVX2, which its C code is compiled for whatever the
//! processor is. So they are used only where the processor has them, and a loop in Rust is used elsewhere: much
//! slower, with the same result.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex};

use reed_solomon_erasure::{Field, ReedSolomon, galois_8};

/// A code for so many blocks.
pub(crate) type Code = ReedSolomon<Portable>;

/// GF(2⁸), on any processor.
#[derive(Debug)]
pub(crate) struct Portable;

/// Whether the processor has what the C code is compiled for, which is Haswell.
#[cfg(target_arch = "x86_64")]
static FAST: LazyLock<bool> = LazyLock::new(|| {
    let fast = std::arch::is_x86_feature_detected!("avx2")
        && std::arch::is_x86_feature_detected!("bmi1")
        && std::arch::is_x86_feature_detected!("bmi2")
        && std::arch::is_x86_feature_detected!("fma")
        && std::arch::is_x86_feature_detected!("lzcnt")
        && std::arch::is_x86_feature_detected!("movbe");
    if !fast {
        tracing::warn!("this processor has no AVX2: Reed-Solomon codes are slow; replicas are not");
    }
    fast
});

/// On other processors the C code is compiled for all of them.
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
            false => slow::<false>(factor, input, out),
        }
    }

    fn mul_slice_add(factor: u8, input: &[u8], out: &mut [u8]) {
        match *FAST {
            true => <galois_8::Field as Field>::mul_slice_add(factor, input, out),
            false => slow::<true>(factor, input, out),
        }
    }
}

/// Multiplies each byte, and adds it to what is there or replaces it.
fn slow<const ADD: bool>(factor: u8, input: &[u8], out: &mut [u8]) {
    assert_eq!(input.len(), out.len(), "blocks are of one length");
    let table: [u8; 256] = std::array::from_fn(|byte| galois_8::mul(factor, byte as u8));
    for (input, out) in input.iter().zip(out) {
        *out = table[usize::from(*input)] ^ if ADD { *out } else { 0 };
    }
}

/// The code for so many blocks. Making one takes a while, so they are kept.
pub(crate) fn code(data: u8, parity: u8) -> Arc<Code> {
    type Codes = HashMap<(u8, u8), Arc<Code>>;
    static CODES: LazyLock<Mutex<Codes>> = LazyLock::new(Mutex::default);
    let mut codes = CODES.lock().expect("no code panics with the codes locked");
    let code = codes.entry((data, parity)).or_insert_with(|| {
        let code = Code::new(data.into(), parity.into());
        Arc::new(code.expect("there are 2 to 32 blocks"))
    });
    code.clone()
}

/// Bytes of each block that are coded at a time: with as many of the parity they are in the processor's first cache.
const STRIPE: usize = 2048;

/// Computes parity. All blocks are of one length.
///
/// # Panics
///
/// If the blocks are not as many as those of the code.
pub(crate) fn encode(code: &Code, data: &[&[u8]], parity: &mut [&mut [u8]]) {
    let len = data.first().map_or(0, |block| block.len());
    for start in (0..len).step_by(STRIPE) {
        let part = start..(start + STRIPE).min(len);
        let data: Vec<_> = data.iter().map(|block| &block[part.clone()]).collect();
        let mut parity: Vec<_> = parity.iter_mut().map(|block| &mut block[part.clone()]).collect();
        code.encode_sep(&data, &mut parity).expect("the blocks are as many as the code wants");
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::{any, prop_assert_eq, proptest};

    use super::{Field, STRIPE, code, encode, galois_8, slow};

    proptest! {
        #[test]
        fn with_and_without_special_instructions_the_result_is_the_same(
            factor in any::<u8>(),
            input in vec(any::<u8>(), 1..300),
        ) {
            let mut fast = vec![7; input.len()];
            let mut portable = fast.clone();
            <galois_8::Field as Field>::mul_slice_add(factor, &input, &mut fast);
            slow::<true>(factor, &input, &mut portable);
            prop_assert_eq!(&fast, &portable);
            <galois_8::Field as Field>::mul_slice(factor, &input, &mut fast);
            slow::<false>(factor, &input, &mut portable);
            prop_assert_eq!(fast, portable);
        }

        #[test]
        fn coded_in_stripes_it_is_the_same(len in 1usize..3 * STRIPE, seed in any::<u8>()) {
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
