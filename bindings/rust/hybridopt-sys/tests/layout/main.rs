//! Compares sizes, offsets and values with the table that a C compiler makes of offload.h, in both
//! directions. The repository's tests/abi/layout_test.c prints that table, and its header_test.sh
//! checks that the table is complete.

use std::collections::BTreeMap;
use std::mem::{size_of, MaybeUninit};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::ptr::addr_of;

use hybridopt_sys::*;

/// Name to offset or value, and size.
type Table = BTreeMap<String, (i64, usize)>;

fn size_behind<T>(_: *const T) -> usize {
    size_of::<T>()
}

/// A field that is not named here does not compile: the pattern has no `..`.
macro_rules! fields {
    ($table:ident, $name:ident { $($field:ident),* $(,)? }) => {
        $table.insert(stringify!($name).to_string(), (0, size_of::<$name>()));
        let $name { $($field: _),* } = $name::default();
        let uninit = MaybeUninit::<$name>::uninit();
        let base = uninit.as_ptr();
        $(
            // SAFETY: only the address is taken.
            let field = unsafe { addr_of!((*base).$field) };
            let offset = field as i64 - base as i64;
            let name = concat!(stringify!($name), ".", stringify!($field)).to_string();
            $table.insert(name, (offset, size_behind(field)));
        )*
    };
}

macro_rules! values {
    ($table:ident, $($name:ident),* $(,)?) => {
        $($table.insert(stringify!($name).to_string(), (i64::from($name), 0));)*
    };
}

#[rustfmt::skip]
mod names;

/// HYBRIDOPT_LAYOUT_TEST, or where the newest build of the repository has it.
fn layout_test() -> PathBuf {
    if let Some(named) = std::env::var_os("HYBRIDOPT_LAYOUT_TEST") {
        return PathBuf::from(named);
    }
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../build/dev/tests/abi_layout_test")
}

fn c_table() -> Table {
    let program = layout_test();
    let output = Command::new(&program).arg("--table").output().unwrap_or_else(|why| {
        panic!("{}: {why}; build it, or set HYBRIDOPT_LAYOUT_TEST to its path", program.display())
    });
    assert!(output.status.success(), "{}: {}", program.display(), output.status);
    String::from_utf8(output.stdout)
        .unwrap()
        .lines()
        .map(|line| match line.split(' ').collect::<Vec<_>>()[..] {
            [name, offset, size] => {
                (name.to_string(), (offset.parse().unwrap(), size.parse().unwrap()))
            }
            _ => panic!("not name, offset, size: {line}"),
        })
        .collect()
}

#[test]
fn layout_is_what_c_says() {
    let (ours, c) = (names::table(), c_table());
    let mut complaints = Vec::new();
    for (name, &(offset, size)) in &c {
        match ours.get(name) {
            None => complaints.push(format!("{name} is not declared")),
            Some(&(got_offset, got_size)) if (got_offset, got_size) != (offset, size) => {
                complaints.push(format!(
                    "{name}: offset or value {got_offset}, size {got_size}; in C {offset}, {size}"
                ));
            }
            Some(_) => {}
        }
    }
    for name in ours.keys().filter(|name| !c.contains_key(*name)) {
        complaints.push(format!("{name} is not in C"));
    }
    assert!(complaints.is_empty(), "{}", complaints.join("\n"));
    assert!(c.len() > 200, "the table has only {} lines", c.len());
}

#[test]
fn default_is_zero_but_for_the_size() {
    let plan = offload_plan_t::default();
    assert_eq!(plan.struct_size as usize, size_of::<offload_plan_t>());
    // SAFETY: a struct of numbers without padding.
    let bytes = unsafe {
        std::slice::from_raw_parts(addr_of!(plan).cast::<u8>(), size_of::<offload_plan_t>())
    };
    assert!(bytes[4..].iter().all(|&byte| byte == 0));
}
