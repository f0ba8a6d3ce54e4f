#include "tests/emulated_cuda/memory_order.h"

#include <execinfo.h>
#include <fmt/format.h>

#include <cstdint>
#include <map>
#include <mutex>

#include "tests/emulated_cuda/emulated.h"
#include "tests/emulated_cuda/rules.h"

namespace emulated {
namespace {

// The newest accesses of a range of bytes. What a later write follows need not be remembered.
struct Newest {
  std::uintptr_t end = 0;
  IssuedPtr write{};
  std::vector<IssuedPtr> reads{};  // since the write; the last one of each stream
};
using History = std::map<std::uintptr_t, Newest>;  // by the range's begin

std::mutex mutex;  // guards the history
auto& history = never_destroyed<History>();

std::uintptr_t number_of(const void* address) { return reinterpret_cast<std::uintptr_t>(address); }

void show_callers(const Issued& work) {
  if (work.callers.empty()) return;
  std::fprintf(stderr, "%s was called by:\n", work.call);
  ::backtrace_symbols_fd(work.callers.data(), static_cast<int>(work.callers.size()), 2);
}

void require_order(const IssuedPtr& earlier, bool earlier_writes, const IssuedPtr& later, const Access& access) {
  if (earlier == nullptr || is_ordered(*earlier, *later)) return;
  show_callers(*earlier);
  show_callers(*later);
  broken("work that shares memory is ordered by streams and events",
         fmt::format("{}, and nothing orders it and {}", described(*later, access),
                     described(*earlier, {access.memory, access.bytes, earlier_writes})));
}

// Makes a range begin at this address, if there is one around it.
void cut(std::uintptr_t at) {
  auto next = history.upper_bound(at);
  if (next == history.begin()) return;
  auto& [begin, range] = *std::prev(next);
  if (begin == at || range.end <= at) return;
  Newest second = range;
  range.end = at;
  history.emplace_hint(next, at, std::move(second));
}

void note_read(Newest& range, const IssuedPtr& work) {
  for (IssuedPtr& read : range.reads) {
    if (read->stream != work->stream) continue;
    read = work;
    return;
  }
  range.reads.push_back(work);
}

void note(const Access& access, const IssuedPtr& work) {
  const std::uintptr_t begin = number_of(access.memory), end = begin + access.bytes;
  if (begin == end) return;
  cut(begin);
  cut(end);
  std::uintptr_t at = begin;
  auto next = history.lower_bound(begin);
  while (at < end) {
    if (next == history.end() || next->first > at) {  // nothing has accessed these bytes
      const std::uintptr_t until = next == history.end() ? end : std::min(end, next->first);
      if (!access.writes) history.emplace_hint(next, at, Newest{until, nullptr, {work}});
      at = until;
      continue;
    }
    Newest& range = next->second;
    require_order(range.write, true, work, access);
    at = range.end;
    if (access.writes) {
      for (const IssuedPtr& read : range.reads) {
        require_order(read, false, work, access);
      }
      next = history.erase(next);
    } else {
      note_read(range, work);
      ++next;
    }
  }
  if (access.writes) history.emplace_hint(next, begin, Newest{end, work, {}});
}

}  // namespace

void note_accesses(const std::vector<Access>& accesses, const IssuedPtr& work) {
  const std::lock_guard lock(mutex);
  for (const Access& access : accesses) {
    note(access, work);
  }
}

void forget_accesses(const void* memory, std::size_t bytes) {
  const std::uintptr_t begin = number_of(memory), end = begin + bytes;
  const std::lock_guard lock(mutex);
  cut(begin);
  cut(end);
  history.erase(history.lower_bound(begin), history.lower_bound(end));
}

std::string described(const Issued& work, const Access& access) {
  return fmt::format("{} (work {} of stream {}) {} {} bytes at {}", work.call, work.number, work.stream,
                     access.writes ? "writes" : "reads", access.bytes, fmt::ptr(access.memory));
}

}  // namespace emulated
