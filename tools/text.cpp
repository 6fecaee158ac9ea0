#include "text.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <ostream>

#include "base/utf8.h"

namespace tool {
namespace {

// The number of letters of a UTF-8 text: all bytes except continuation bytes.
size_t Width(const std::string& text) {
  return static_cast<size_t>(
      std::count_if(text.begin(), text.end(), [](char byte) { return (byte & 0xc0) != 0x80; }));
}

// The edit distance: how many letters must be inserted, removed or replaced to turn one word into
// the other.
size_t Distance(const std::string& one, const std::string& other) {
  std::vector<size_t> row(other.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 0; i < one.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i + 1;
    for (size_t j = 0; j < other.size(); ++j) {
      const size_t changed = diagonal + (one[i] == other[j] ? 0 : 1);
      diagonal = row[j + 1];
      row[j + 1] = std::min({changed, row[j] + 1, row[j + 1] + 1});
    }
  }
  return row.back();
}

std::string Coloured(const char* colour, const std::string& text) {
  static const bool wanted = isatty(STDOUT_FILENO) == 1 && std::getenv("NO_COLOR") == nullptr;
  return wanted ? std::string("\033[") + colour + "m" + text + "\033[0m" : text;
}

// Shows a line of ASCII on the terminal at standard error, in place of the one before. A line that
// is wider than the terminal would become two rows, of which only the last one could be replaced.
void ShowLine(std::string line) {
  winsize size{};
  if (ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 1)
    line.resize(std::min<size_t>(line.size(), size.ws_col - 1));
  std::fprintf(stderr, "\r%s\033[K", line.c_str());  // \033[K wipes the rest of a longer line
  std::fflush(stderr);
}

}  // namespace

std::string LowerCase(std::string text) {
  for (char& letter : text)
    if (letter >= 'A' && letter <= 'Z') letter = static_cast<char>(letter - 'A' + 'a');
  return text;
}

std::string ShapeText(const std::vector<int64_t>& shape) {
  std::string text;
  for (int64_t extent : shape) text += (text.empty() ? "" : " x ") + std::to_string(extent);
  return text;
}

void Table::Add(std::vector<std::string> cells) {
  for (std::string& cell : cells) cell = hybridopt::Printable(cell);
  rows_.push_back(std::move(cells));
}

void Table::Print(std::ostream& out) const {
  std::vector<size_t> widths;
  for (const Column& column : columns_) widths.push_back(Width(column.title));
  for (const auto& row : rows_)
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], Width(row[i]));
  const auto print = [&](const auto& cell_of) {
    std::string line;
    for (size_t i = 0; i < columns_.size(); ++i) {
      const std::string cell = cell_of(i);
      const std::string fill(widths[i] - Width(cell), ' ');
      if (i > 0) line += "  ";
      line += columns_[i].align == Align::kLeft ? cell + fill : fill + cell;
    }
    line.erase(line.find_last_not_of(' ') + 1);
    out << line << '\n';
  };
  print([&](size_t i) { return std::string(columns_[i].title); });
  for (const auto& row : rows_) print([&](size_t i) { return row[i]; });
}

std::string NearestWord(const std::string& word, const std::vector<std::string>& words) {
  constexpr size_t kWordMost = 32;
  constexpr size_t kDistanceMost = 2;
  constexpr size_t kPartLeast = 4;
  std::string nearest;
  size_t least = kDistanceMost + 1;
  for (const std::string& candidate : words) {
    const size_t distance = Distance(word.substr(0, kWordMost), candidate);
    if (distance >= least) continue;
    least = distance;
    nearest = candidate;
  }
  const size_t begin = word.find_first_not_of('-');
  if (!nearest.empty() || begin == std::string::npos || word.size() - begin < kPartLeast)
    return nearest;
  for (const std::string& candidate : words)
    if (candidate.find(word.substr(begin)) != std::string::npos) return candidate;
  return "";
}

std::string Quoted(const std::string& word) {
  constexpr size_t kLongBytes = 100;
  constexpr size_t kShownBytes = 80;
  if (word.size() <= kLongBytes) return "'" + hybridopt::Printable(word) + "'";
  return "'" + hybridopt::Printable(word, kShownBytes) + "'... (" + std::to_string(word.size()) +
         " bytes)";
}

std::string Counted(uint64_t count, const char* noun) {
  return std::to_string(count) + " " + noun + (count == 1 ? "" : "s");
}

std::string NumberText(double number) {
  const int decimals = number >= 99.95 ? 0 : number >= 9.995 ? 1 : 2;
  char text[64];
  std::snprintf(text, sizeof(text), "%.*f", number < 0.1 ? 3 : decimals, number);
  return text;
}

std::string Green(const std::string& text) { return Coloured("32", text); }
std::string Yellow(const std::string& text) { return Coloured("33", text); }

StageLine::StageLine() : terminal_(isatty(STDERR_FILENO) == 1) {}

StageLine::~StageLine() {
  if (terminal_) std::fputs("\r\033[K", stderr);
}

void StageLine::Show(const char* text) {
  if (terminal_) ShowLine(std::string(text) + " ..");
}

ProgressBar::ProgressBar(const char* what) : what_(what), terminal_(isatty(STDERR_FILENO) == 1) {}

ProgressBar::~ProgressBar() {
  if (percent_ >= 0) std::fputs("\r\033[K", stderr);
}

void ProgressBar::Show(uint64_t done, uint64_t total) {
  constexpr int kWidth = 40;
  const int percent =
      total == 0 ? 100
                 : static_cast<int>(100 * static_cast<double>(done) / static_cast<double>(total));
  if (!terminal_ || percent == percent_) return;
  percent_ = percent;
  const std::string bar(static_cast<size_t>(percent * kWidth / 100), '#');
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - begin_).count();
  const double rate = static_cast<double>(done) / std::max(seconds, 1e-3);
  const double left = static_cast<double>(total - done) / std::max(rate, 1.0);
  char line[256];
  std::snprintf(line, sizeof(line), "%s %3d %% of %s, %s/s, %.0f s left [%-*s]", what_, percent,
                SizeText(total).c_str(), SizeText(static_cast<uint64_t>(rate)).c_str(), left,
                kWidth, bar.c_str());
  ShowLine(line);
}

}  // namespace tool
