// A named stretch of the calling thread's time, which profilers of GPUs show above the work that was issued in it.
#pragma once

#include <string>

namespace ballast {

// Ranges of a thread end in the opposite order of their beginnings. Costs next to nothing where no profiler looks on.
class ProfilerRange {
 public:
  explicit ProfilerRange(const std::string& name);
  ~ProfilerRange();
  ProfilerRange(const ProfilerRange&) = delete;
  ProfilerRange& operator=(const ProfilerRange&) = delete;
};

}  // namespace ballast
