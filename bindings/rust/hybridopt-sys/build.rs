//! Finds libhybridopt.so: where HYBRIDOPT_LIB_DIR says, else where pkg-config says, else in the
//! build tree of the repository that this crate lies in.

use std::env;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

const LIBRARY: &str = "libhybridopt.so";

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-env-changed=HYBRIDOPT_LIB_DIR");
    println!("cargo:rerun-if-env-changed=PKG_CONFIG_PATH");
    let directory = find().unwrap_or_else(|why| {
        eprintln!("{why}");
        std::process::exit(1);
    });
    let seen = make_visible(&directory);
    println!("cargo:rustc-link-search=native={}", seen.display());
    println!("cargo:rustc-link-lib=dylib=hybridopt");
    println!("cargo:lib_dir={}", directory.display());
}

fn find() -> Result<PathBuf, String> {
    if let Some(named) = env::var_os("HYBRIDOPT_LIB_DIR") {
        let directory = PathBuf::from(named);
        return match directory.join(LIBRARY).exists() {
            true => Ok(directory),
            false => Err(format!(
                "HYBRIDOPT_LIB_DIR is {}, but there is no {LIBRARY} in it",
                directory.display()
            )),
        };
    }
    let candidates = from_pkg_config().into_iter().chain(from_build_tree());
    candidates.into_iter().next().ok_or_else(|| {
        format!(
            "{LIBRARY} was not found: set HYBRIDOPT_LIB_DIR to its directory, or install hybridopt \
             so that `pkg-config hybridopt` works, or build the repository this crate lies in \
             (cmake --preset release && cmake --build --preset release)"
        )
    })
}

fn from_pkg_config() -> Option<PathBuf> {
    let output =
        Command::new("pkg-config").args(["--variable=libdir", "hybridopt"]).output().ok()?;
    let directory = PathBuf::from(String::from_utf8(output.stdout).ok()?.trim());
    (output.status.success() && directory.join(LIBRARY).exists()).then_some(directory)
}

/// The newest of the builds that a program can link (not those with a sanitizer).
fn from_build_tree() -> Option<PathBuf> {
    let builds = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../build");
    let modified = |directory: &PathBuf| fs::metadata(directory.join(LIBRARY))?.modified();
    ["release", "dev"]
        .iter()
        .map(|preset| builds.join(preset))
        .filter_map(|directory| Some((modified(&directory).ok()?, directory)))
        .max()
        .and_then(|(_, directory)| directory.canonicalize().ok())
}

/// Cargo lets the programs that it runs (tests, doc tests, examples) find libraries only below its
/// target directory, so there are links to the library there.
fn make_visible(directory: &Path) -> PathBuf {
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    for entry in fs::read_dir(directory).expect("the library was found in it").flatten() {
        let name = entry.file_name();
        if name.to_string_lossy().starts_with(LIBRARY) {
            let _ = fs::remove_file(out.join(&name));
            symlink(entry.path(), out.join(&name)).expect("OUT_DIR can be written");
        }
    }
    out
}
