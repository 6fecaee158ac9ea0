#include "checkpoint/format/json.h"

#include <charconv>
#include <cmath>
#include <cstdarg>
#include <cstdio>

#include "base/check.h"
#include "base/utf8.h"

namespace hybridopt::checkpoint {
namespace {

bool IsDigit(char letter) { return letter >= '0' && letter <= '9'; }

void AppendUtf8(std::string* text, uint32_t code) {
  const auto append = [&](uint32_t byte) { text->push_back(static_cast<char>(byte)); };
  if (code < 0x80) {
    append(code);
  } else if (code < 0x800) {
    append(0xc0 | code >> 6);
    append(0x80 | (code & 0x3f));
  } else if (code < 0x10000) {
    append(0xe0 | code >> 12);
    append(0x80 | (code >> 6 & 0x3f));
    append(0x80 | (code & 0x3f));
  } else {
    append(0xf0 | code >> 18);
    append(0x80 | (code >> 12 & 0x3f));
    append(0x80 | (code >> 6 & 0x3f));
    append(0x80 | (code & 0x3f));
  }
}

}  // namespace

// ------------------------------------------------------------------------------------- reading --

void JsonReader::Fail(const char* format, ...) {
  if (!ok()) return;
  char text[512];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof(text), format, arguments);
  va_end(arguments);
  error_ = std::string(text) + ", at byte " + std::to_string(at_);
}

void JsonReader::SkipSpace() {
  while (at_ < text_.size() &&
         (text_[at_] == ' ' || text_[at_] == '\n' || text_[at_] == '\r' || text_[at_] == '\t'))
    ++at_;
}

// Consumes the next character if it is `expected`.
bool JsonReader::Take(char expected) {
  if (!ok()) return false;
  SkipSpace();
  if (at_ == text_.size() || text_[at_] != expected) return false;
  ++at_;
  return true;
}

// Consumes the next character; fails if it is not `expected`.
bool JsonReader::Consume(char expected) {
  if (Take(expected)) return true;
  if (at_ >= text_.size())
    Fail("the text ends where '%c' is expected", expected);
  else
    Fail("'%c' is expected", expected);
  return false;
}

void JsonReader::Members(FunctionRef<void(std::string)> member) {
  if (!Consume('{') || Take('}')) return;
  do {
    std::string key = String();
    if (!Consume(':')) return;
    member(std::move(key));
    if (!ok()) return;
  } while (Take(','));
  Consume('}');
}

void JsonReader::Object(std::span<const Field> fields) {
  HYBRIDOPT_CHECK(fields.size() <= 64);
  uint64_t seen = 0;
  Members([&](const std::string& key) {
    uint64_t bit = 1;
    for (const Field& field : fields) {
      if (key == field.key) {
        if ((seen & bit) != 0) Fail("the key \"%s\" stands twice", field.key);
        seen |= bit;
        if (ok()) field.read();
        return;
      }
      bit <<= 1;
    }
    Fail("the key \"%.64s\" is not known here", key.c_str());
  });
  uint64_t bit = 1;
  for (const Field& field : fields) {
    if ((seen & bit) == 0 && !field.is_optional) Fail("the key \"%s\" is missing", field.key);
    bit <<= 1;
  }
}

void JsonReader::Array(FunctionRef<void()> element) {
  if (!Consume('[') || Take(']')) return;
  do {
    element();
    if (!ok()) return;
  } while (Take(','));
  Consume(']');
}

uint32_t JsonReader::HexDigits() {
  uint32_t code = 0;
  const size_t end = at_ + 4;
  if (end > text_.size()) {
    Fail("the text ends inside an escape");
    return 0;
  }
  const auto [next, error] = std::from_chars(&text_[at_], text_.data() + end, code, 16);
  if (error != std::errc() || next != text_.data() + end) Fail("an escape without four hex digits");
  at_ = end;
  return code;
}

// Reads the escape that follows a backslash.
void JsonReader::Escape(std::string* text) {
  if (at_ == text_.size()) return Fail("the text ends inside an escape");
  const char letter = text_[at_++];
  constexpr std::string_view kShort = "\"\\/bfnrt";
  if (const size_t i = kShort.find(letter); i != std::string_view::npos) {
    text->push_back("\"\\/\b\f\n\r\t"[i]);
    return;
  }
  if (letter != 'u') return Fail("an escape that JSON does not have");
  uint32_t code = HexDigits();
  if (code >= 0xd800 && code < 0xdc00 && text_.substr(at_, 2) == "\\u") {
    at_ += 2;
    const uint32_t low = HexDigits();
    code =
        low >= 0xdc00 && low < 0xe000 ? 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00) : code;
  }
  if (code >= 0xd800 && code < 0xe000) return Fail("half of a surrogate pair");
  if (ok()) AppendUtf8(text, code);
}

std::string JsonReader::String() {
  std::string text;
  if (!Consume('"')) return text;
  while (ok()) {
    if (at_ == text_.size()) {
      Fail("the text ends inside a string");
      break;
    }
    const char letter = text_[at_];
    if (letter == '"') {
      ++at_;
      return text;
    }
    if (letter == '\\') {
      ++at_;
      Escape(&text);
      continue;
    }
    const size_t bytes = FirstCharacter(text_.substr(at_)).bytes;
    if (bytes == 0 || static_cast<unsigned char>(letter) < 0x20) {
      Fail(bytes == 0 ? "bytes that are not UTF-8" : "a control character inside a string");
      break;
    }
    text.append(text_, at_, bytes);
    at_ += bytes;
  }
  return {};
}

// Reads up to the next character that is not part of a number.
std::string_view JsonReader::NumberText() {
  if (!ok()) return {};
  SkipSpace();
  const size_t end = text_.find_first_not_of("+-.0123456789Ee", at_);
  const std::string_view number =
      text_.substr(at_, end == std::string_view::npos ? end : end - at_);
  if (number.empty()) Fail("a number is expected");
  return number;
}

uint64_t JsonReader::Unsigned(uint64_t most) {
  const std::string_view text = NumberText();
  if (!ok()) return 0;
  const int bytes = static_cast<int>(std::min<size_t>(text.size(), 32));
  uint64_t number = 0;
  const auto [next, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  const bool plain = error != std::errc::invalid_argument && next == text.data() + text.size() &&
                     (text.size() == 1 || text[0] != '0');
  if (!plain) {
    Fail("%.*s is not a whole number of at least 0", bytes, text.data());
    return 0;
  }
  if (error != std::errc() || number > most) {
    Fail("%.*s is too large, at most %llu is allowed", bytes, text.data(),
         static_cast<unsigned long long>(most));
    return 0;
  }
  at_ += text.size();
  return number;
}

double JsonReader::Number() {
  const std::string_view text = NumberText();
  if (!ok()) return 0;
  // JSON requires a leading digit, no superfluous leading zero, and digits on both sides of the
  // point.
  const std::string_view digits = text.substr(text[0] == '-');
  const size_t point = digits.find('.');
  const bool grammar = !digits.empty() && IsDigit(digits[0]) &&
                       (digits.size() == 1 || digits[0] != '0' || !IsDigit(digits[1])) &&
                       (point == std::string_view::npos ||
                        (point + 1 < digits.size() && IsDigit(digits[point + 1])));
  double number = 0;
  const auto [next, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (!grammar || error != std::errc() || next != text.data() + text.size() ||
      !std::isfinite(number)) {
    Fail("%.*s is not a finite number", static_cast<int>(std::min<size_t>(text.size(), 32)),
         text.data());
    return 0;
  }
  at_ += text.size();
  return number;
}

bool JsonReader::Bool() {
  if (!ok()) return false;
  SkipSpace();
  for (const std::string_view word : {"true", "false"}) {
    if (text_.substr(at_, word.size()) != word) continue;
    at_ += word.size();
    return word == "true";
  }
  Fail("true or false is expected");
  return false;
}

void JsonReader::End() {
  SkipSpace();
  if (at_ != text_.size()) Fail("more text after the end");
}

// ------------------------------------------------------------------------------------- writing --

void AppendJsonString(std::string* json, std::string_view text) {
  json->push_back('"');
  for (const char letter : text) {
    if (letter == '"' || letter == '\\') {
      json->push_back('\\');
      json->push_back(letter);
    } else if (static_cast<unsigned char>(letter) < 0x20) {
      char escape[8];
      std::snprintf(escape, sizeof(escape), "\\u%04x", static_cast<unsigned>(letter));
      json->append(escape);
    } else {
      json->push_back(letter);
    }
  }
  json->push_back('"');
}

void AppendJsonNumber(std::string* json, double number) {
  HYBRIDOPT_CHECK(std::isfinite(number));
  char digits[32];
  const auto [end, error] = std::to_chars(digits, digits + sizeof(digits), number);
  HYBRIDOPT_CHECK(error == std::errc());
  json->append(digits, end);
}

}  // namespace hybridopt::checkpoint
