# Decides whether the CUDA backend is built, and how. Sets BALLAST_HAS_CUDA.

set(BALLAST_HAS_CUDA OFF)
if(BALLAST_CUDA STREQUAL "OFF")
  return()
endif()

include(CheckLanguage)
set(CMAKE_CUDA_ARCHITECTURES ${BALLAST_CUDA_ARCHITECTURES})
set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
check_language(CUDA)
if(NOT CMAKE_CUDA_COMPILER)
  if(BALLAST_CUDA STREQUAL "ON")
    message(FATAL_ERROR "BALLAST_CUDA=ON, but no CUDA compiler was found. Put nvcc on the PATH or set CUDACXX.")
  endif()
  message(STATUS "Ballast: no CUDA compiler found, building for CPUs only")
  return()
endif()

enable_language(CUDA)
ballast_find(CUDAToolkit REQUIRED)
set(BALLAST_HAS_CUDA ON)

if(NOT DEFINED CMAKE_CUDA20_STANDARD_COMPILE_OPTION) # CMake 3.25 does not know that nvcc has C++20
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
  set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
endif()
set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
set(CMAKE_CUDA_EXTENSIONS OFF)

# The bits must equal the CPU's: no contraction, IEEE division and square root, denormals kept.
# Relaxed constexpr: the formulas (*_math.h) are constexpr functions, compiled for both devices.
add_compile_options(
  "$<$<COMPILE_LANGUAGE:CUDA>:--fmad=false;--prec-div=true;--prec-sqrt=true;--ftz=false;--expt-relaxed-constexpr>")

# NCCL is loaded, not linked: what is built here looks for it where it was found. What is installed does not.
if(BALLAST_HAS_CUDA)
  include(nvidia_packages)
  ballast_find_nccl()
  if(TARGET nvidia::nccl)
    cmake_path(GET BALLAST_nccl_LIBRARY PARENT_PATH folder)
    list(APPEND CMAKE_BUILD_RPATH ${folder})
  endif()
endif()
