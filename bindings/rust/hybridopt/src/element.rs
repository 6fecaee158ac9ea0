//! The element types of params, gradients and states.

use hybridopt_sys as sys;

/// An element type, as a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Dtype {
    /// `f32`
    Fp32,
    /// [`Bf16`]
    Bf16,
    /// [`Fp16`]
    Fp16,
    /// `u16`, of state only: the lower halves of split masters.
    U16,
    /// `i8`, of state only: the bytes of 24-bit masters.
    I8,
}

impl Dtype {
    pub(crate) fn raw(self) -> i32 {
        match self {
            Dtype::Fp32 => sys::OFFLOAD_FP32,
            Dtype::Bf16 => sys::OFFLOAD_BF16,
            Dtype::Fp16 => sys::OFFLOAD_FP16,
            Dtype::U16 => sys::OFFLOAD_U16,
            Dtype::I8 => sys::OFFLOAD_I8,
        }
    }

    pub(crate) fn from_raw(raw: i32) -> Option<Self> {
        [Dtype::Fp32, Dtype::Bf16, Dtype::Fp16, Dtype::U16, Dtype::I8]
            .into_iter()
            .find(|dtype| dtype.raw() == raw)
    }

    /// Bytes of one element.
    pub fn size(self) -> usize {
        match self {
            Dtype::Fp32 => 4,
            Dtype::Bf16 | Dtype::Fp16 | Dtype::U16 => 2,
            Dtype::I8 => 1,
        }
    }
}

/// The bits of a bfloat16: the upper half of an `f32`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct Bf16(pub u16);

/// The bits of an IEEE half. The crate does no arithmetic with it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct Fp16(pub u16);

impl From<Bf16> for f32 {
    fn from(value: Bf16) -> f32 {
        f32::from_bits(u32::from(value.0) << 16)
    }
}

impl From<f32> for Bf16 {
    /// To nearest, ties to even; NaN stays NaN.
    fn from(value: f32) -> Bf16 {
        let bits = value.to_bits();
        if value.is_nan() {
            return Bf16((bits >> 16) as u16 | 0x40);
        }
        Bf16(((u64::from(bits) + 0x7fff + u64::from(bits >> 16 & 1)) >> 16) as u16)
    }
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for u16 {}
    impl Sealed for i8 {}
    impl Sealed for super::Bf16 {}
    impl Sealed for super::Fp16 {}
}

/// `f32`, [`Bf16`] and [`Fp16`]; `u16` and `i8` for state only.
pub trait Element: Copy + Default + Send + Sync + 'static + sealed::Sealed {
    /// The same as a value.
    const DTYPE: Dtype;
}

impl Element for f32 {
    const DTYPE: Dtype = Dtype::Fp32;
}

impl Element for u16 {
    const DTYPE: Dtype = Dtype::U16;
}

impl Element for i8 {
    const DTYPE: Dtype = Dtype::I8;
}

impl Element for Bf16 {
    const DTYPE: Dtype = Dtype::Bf16;
}

impl Element for Fp16 {
    const DTYPE: Dtype = Dtype::Fp16;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bf16_rounds_to_nearest_even_and_keeps_nan() {
        let cases: [(u32, u16); 8] = [
            (0x3f80_0000, 0x3f80),
            (0x3f80_8000, 0x3f80), // a tie, down to even
            (0x3f81_8000, 0x3f82), // a tie, up to even
            (0x3f80_8001, 0x3f81),
            (0x7f7f_ffff, 0x7f80), // the largest overflows
            (0xff80_0000, 0xff80),
            (0x7f80_0001, 0x7fc0), // a NaN whose payload would be lost
            (0x8000_0000, 0x8000),
        ];
        for (from, to) in cases {
            assert_eq!(Bf16::from(f32::from_bits(from)).0, to, "{from:#x}");
        }
        assert_eq!(f32::from(Bf16(0xc040)), -3.0);
    }
}
