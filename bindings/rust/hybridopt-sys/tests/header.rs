//! Compares every declaration with the one in offload.h: names, order and types of struct fields
//! and of parameters, which sizes and offsets alone would not tell.

use std::fmt::Write;
use std::fs;
use std::path::Path;

const SOURCES: [&str; 2] = [include_str!("../src/types.rs"), include_str!("../src/functions.rs")];

/// The plain C99 of the header, comments left out, white space made single.
fn header() -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../include/offload.h");
    let text = fs::read_to_string(&path).unwrap_or_else(|why| panic!("{}: {why}", path.display()));
    let begin = text.find("/* begin-plain-c99 */").expect("begin-plain-c99");
    let end = text.find("/* end-plain-c99 */").expect("end-plain-c99");
    let mut code = String::new();
    let mut rest = &text[begin..end];
    while let Some(open) = rest.find("/*") {
        code += &rest[..open];
        rest = &rest[open + rest[open..].find("*/").expect("the comment's end") + 2..];
    }
    code += rest;
    squeeze(&code)
}

fn squeeze(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// `const char* name`, `double values[8]` or a pointer to a function, as Rust says it.
fn declaration(text: &str) -> String {
    let text = text.trim();
    if let Some(open) = text.find("(*") {
        let close = open + text[open..].find(')').expect("a function pointer's name ends");
        let name = &text[open + 2..close];
        let parameters = text[close + 1..].trim_matches(&['(', ')'][..]);
        return format!("{name}: {}", function_pointer(&text[..open], parameters));
    }
    let (text, length) = match text.split_once('[') {
        Some((before, length)) => (before, length.strip_suffix(']')),
        None => (text, None),
    };
    let at = text.rfind(&[' ', '*'][..]).expect("type and name") + 1;
    match length {
        Some(length) => format!("{}: [{}; {length}]", &text[at..], type_name(&text[..at])),
        None => format!("{}: {}", &text[at..], type_name(&text[..at])),
    }
}

fn function_pointer(result: &str, parameters: &str) -> String {
    let parameters: Vec<String> = parameters.split(',').map(declaration).collect();
    let arrow = arrow(result);
    format!("Option<unsafe extern \"C\" fn({}){arrow}>", parameters.join(", "))
}

fn arrow(result: &str) -> String {
    match result.trim() {
        "void" => String::new(),
        result => format!(" -> {}", type_name(result)),
    }
}

fn type_name(c: &str) -> String {
    let c = c.trim();
    if let Some(target) = c.strip_suffix('*') {
        return match target.trim().strip_prefix("const ") {
            Some(constant) => format!("*const {}", type_name(constant)),
            None => format!("*mut {}", type_name(target)),
        };
    }
    let name = match c {
        "int32_t" => "i32",
        "uint32_t" => "u32",
        "int64_t" => "i64",
        "uint64_t" => "u64",
        "double" => "f64",
        "float" => "f32",
        "char" => "c_char",
        "void" => "c_void",
        own if own.starts_with("offload_") => own,
        other => panic!("the type '{other}' has no name here"),
    };
    name.to_string()
}

/// What the header declares, one declaration a line.
fn declared() -> String {
    let header = header();
    let mut lines = String::new();
    let mut rest = header.as_str();
    while let Some(at) = rest.find("typedef ") {
        rest = &rest[at + "typedef ".len()..];
        let end = rest.find(';').unwrap();
        if let Some(open) = rest[..end].find('{') {
            let close = rest.find('}').unwrap();
            let name = rest[close + 1..close + rest[close..].find(';').unwrap()].trim();
            for field in rest[open + 1..close].split(';').filter(|text| !text.trim().is_empty()) {
                writeln!(lines, "{name}.{}", declaration(field)).unwrap();
            }
            rest = &rest[close..];
        } else if rest[..end].contains("(*") {
            writeln!(lines, "type {}", declaration(&rest[..end]).replacen(": ", " = ", 1)).unwrap();
        } else {
            let (target, name) = rest[..end].rsplit_once(' ').unwrap();
            let target = type_name(target.trim_start_matches("struct "));
            writeln!(lines, "type {name} = {target}").unwrap();
        }
    }
    let mut rest = header.as_str();
    while let Some(at) = rest.find("OFFLOAD_API ") {
        rest = &rest[at + "OFFLOAD_API ".len()..];
        let end = rest.find(';').unwrap();
        let (start, parameters) = rest[..end].split_once('(').unwrap();
        let at = start.rfind(&[' ', '*'][..]).unwrap() + 1;
        let parameters: Vec<String> = match parameters.strip_suffix(')').unwrap() {
            "void" => Vec::new(),
            some => some.split(',').map(declaration).collect(),
        };
        let (result, name) = (arrow(&start[..at]), &start[at..]);
        writeln!(lines, "fn {name}({}){result}", parameters.join(", ")).unwrap();
    }
    lines
}

/// What the crate declares, in the same words.
fn ours() -> String {
    let mut lines = String::new();
    for source in SOURCES {
        let code: Vec<&str> = source.lines().filter(|line| !line.starts_with("//")).collect();
        // What rustfmt wraps is one line again.
        let text = squeeze(&code.join("\n"));
        let text = text.replace(",)", ")").replace(", )", ")").replace("( ", "(");
        let text = text.replace("Option< ", "Option<").replace(", >", ">");
        let mut rest = text.as_str();
        while let Some(at) = rest.find("pub ") {
            rest = &rest[at + "pub ".len()..];
            if let Some(after) = rest.strip_prefix("struct ") {
                let (name, body) = after.split_once(" {").unwrap();
                let body = &body[..body.find('}').unwrap()];
                for field in body.split("pub ").filter(|text| text.starts_with(char::is_alphabetic))
                {
                    let field = field.trim().trim_end_matches(',');
                    writeln!(lines, "{name}.{field}").unwrap();
                }
                rest = &after[name.len() + body.len()..];
            } else if rest.starts_with("type ") || rest.starts_with("fn ") {
                writeln!(lines, "{}", &rest[..rest.find(';').unwrap()]).unwrap();
            }
        }
    }
    lines
}

#[test]
fn every_declaration_is_the_headers() {
    let sorted = |text: &str| {
        // Fields keep their order; `type` and `fn` may stand anywhere.
        let mut lines: Vec<String> = text.lines().map(str::to_string).collect();
        lines.sort_by_key(|line| match line.find('.') {
            Some(at) if !line.starts_with("type ") => line[..at].to_string(),
            _ => line.clone(),
        });
        lines
    };
    let (declared, ours) = (declared(), ours());
    let (expected, got) = (sorted(&declared), sorted(&ours));
    let missing: Vec<_> = expected.iter().filter(|line| !got.contains(line)).collect();
    let extra: Vec<_> = got.iter().filter(|line| !expected.contains(line)).collect();
    assert!(
        missing.is_empty() && extra.is_empty(),
        "offload.h declares, this crate does not:\n{missing:#?}\n\
         this crate declares, offload.h does not:\n{extra:#?}"
    );
    for (got, expected) in got.iter().zip(&expected) {
        assert_eq!(got, expected, "left: this crate's order of fields; right: offload.h's");
    }
    assert!(expected.len() > 200, "only {} declarations were understood", expected.len());
}
