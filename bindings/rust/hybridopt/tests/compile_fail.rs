//! The doc tests that must not compile fail for the reason they name. (A stable rustdoc looks only
//! whether they fail.)

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The compiler beside the cargo that runs this.
fn rustc() -> PathBuf {
    if let Some(named) = std::env::var_os("RUSTC") {
        return PathBuf::from(named);
    }
    match std::env::var_os("CARGO").map(|cargo| Path::new(&cargo).with_file_name("rustc")) {
        Some(beside) if beside.exists() => beside,
        _ => PathBuf::from("rustc"),
    }
}

/// The newest build of the crate, as this test was linked with it.
fn library(deps: &Path) -> PathBuf {
    let builds = fs::read_dir(deps).unwrap().map(|entry| entry.unwrap().path()).filter(|path| {
        let name = path.file_name().unwrap().to_string_lossy();
        name.starts_with("libhybridopt-") && name.ends_with(".rlib")
    });
    builds.max_by_key(|path| path.metadata().unwrap().modified().unwrap()).expect("an rlib")
}

/// (where, error code, program) of each example with that fence.
fn examples() -> Vec<(String, String, String)> {
    let mut examples = Vec::new();
    for file in fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("src")).unwrap() {
        let path = file.unwrap().path();
        let text = fs::read_to_string(&path).unwrap();
        let mut lines = text.lines().enumerate();
        while let Some((number, line)) = lines.next() {
            let code = match line.split("```compile_fail,").nth(1) {
                Some(code) => code,
                None => continue,
            };
            let mut body = String::new();
            for (_, line) in lines.by_ref() {
                let line = line.trim_start().trim_start_matches("//!").trim_start_matches("///");
                let line = line.strip_prefix(' ').unwrap_or(line);
                if line.starts_with("```") {
                    break;
                }
                body += line.strip_prefix("# ").unwrap_or(line);
                body.push('\n');
            }
            let program = format!(
                "fn main() {{ example().unwrap() }}\n\
                 fn example() -> Result<(), hybridopt::Error> {{\n{body}}}\n"
            );
            let place = format!("{}:{}", path.file_name().unwrap().to_string_lossy(), number + 1);
            examples.push((place, code.to_string(), program));
        }
    }
    examples
}

#[test]
fn each_fails_with_its_code_and_no_other() {
    let exe = std::env::current_exe().unwrap();
    let deps = exe.parent().unwrap();
    let scratch = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
    let mut complaints = Vec::new();
    let examples = examples();
    for (place, code, program) in &examples {
        let source = scratch.join("compile_fail.rs");
        fs::write(&source, program).unwrap();
        let output = Command::new(rustc())
            .args(["--edition=2021", "--emit=metadata", "--crate-type=bin", "-A", "warnings"])
            .arg("-L")
            .arg(format!("dependency={}", deps.display()))
            .arg("--extern")
            .arg(format!("hybridopt={}", library(deps).display()))
            .arg("-o")
            .arg(scratch.join("compile_fail.rmeta"))
            .arg(&source)
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stderr);
        let mut codes: Vec<&str> = text
            .lines()
            .filter(|line| line.starts_with("error"))
            .filter(|line| !line.contains("aborting due to"))
            .map(|line| line.trim_start_matches("error").split(':').next().unwrap())
            .collect();
        codes.dedup();
        if codes != [format!("[{code}]")] {
            complaints.push(format!("{place}: expected {code}, got\n{text}"));
        }
    }
    assert!(complaints.is_empty(), "{}", complaints.join("\n"));
    assert!(examples.len() >= 9, "only {} examples were found", examples.len());
}
