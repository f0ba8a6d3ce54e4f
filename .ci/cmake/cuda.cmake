# Decides whether the CUDA backend is built, and how. Sets BALLAST_HAS_CUDA.

set(BALLAST_HAS_CUDA OFF)
if(BALLAST_CUDA STREQUAL "OFF")
  return()
endif()

# Try nvcc on a small file, and return the beginning of its errors, which name a host compiler that it does not support.
function(ballast_errors_of_nvcc nvcc result)
  set(file ${CMAKE_BINARY_DIR}/CMakeFiles/ballast_nvcc.cu)
  file(WRITE ${file} "int main() { return 0; }\n")
  separate_arguments(nvcc UNIX_COMMAND "${nvcc}") # such as "ccache nvcc"
  set(host)
  if(NOT "$ENV{CUDAHOSTCXX}" STREQUAL "")
    set(host -ccbin $ENV{CUDAHOSTCXX})
  endif()
  execute_process(COMMAND ${nvcc} ${host} -c ${file} -o ${file}.o OUTPUT_VARIABLE said ERROR_VARIABLE said RESULT_VARIABLE code)
  if(code STREQUAL "0")
    set(said "See the log in ${CMAKE_BINARY_DIR}/CMakeFiles.")
  elseif(said STREQUAL "")
    set(said "${code}") # it could not be started
  endif()
  string(SUBSTRING "${said}" 0 800 said)
  string(STRIP "${said}" said)
  set(${result} "${said}" PARENT_SCOPE)
endfunction()

# End this file without CUDA, whose nvcc cannot be used. The arguments are the parts of the reason.
macro(ballast_leave_cuda_out)
  string(CONCAT why ${ARGV})
  if(BALLAST_CUDA STREQUAL "ON")
    message(FATAL_ERROR "BALLAST_CUDA=ON, but ${why}")
  endif()
  message(WARNING "Ballast: ${why}\nBuilding for CPUs only.")
  return()
endmacro()

# A search that failed in an earlier configuration is made again: nvcc may be there by now.
if(DEFINED CMAKE_CUDA_COMPILER AND NOT CMAKE_CUDA_COMPILER)
  unset(CMAKE_CUDA_COMPILER CACHE)
endif()
if(NOT DEFINED CMAKE_CUDA_COMPILER AND "$ENV{CUDACXX}" STREQUAL "") # NVIDIA's packages do not put nvcc on the PATH
  find_program(found_nvcc nvcc NO_CACHE NO_CMAKE_SYSTEM_PATH
    PATHS $ENV{CUDA_HOME}/bin $ENV{CUDA_PATH}/bin /usr/local/cuda/bin)
  if(found_nvcc)
    set(ENV{CUDACXX} ${found_nvcc})
  endif()
endif()

include(CheckLanguage)
set(CMAKE_CUDA_ARCHITECTURES ${BALLAST_CUDA_ARCHITECTURES})
set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
check_language(CUDA)
if(NOT CMAKE_CUDA_COMPILER AND NOT "$ENV{CUDACXX}" STREQUAL "")
  ballast_errors_of_nvcc("$ENV{CUDACXX}" said)
  set(unusable "$ENV{CUDACXX} cannot compile a program:\n${said}\n"
    "Set CUDAHOSTCXX to a C++ compiler that this nvcc supports, or use a newer CUDA. Ballast needs CUDA 12.8 or newer.")
  list(JOIN unusable "" unusable)
  ballast_leave_cuda_out("${unusable}")
endif()
if(NOT CMAKE_CUDA_COMPILER)
  if(BALLAST_CUDA STREQUAL "ON")
    message(FATAL_ERROR "BALLAST_CUDA=ON, but no CUDA compiler was found in the PATH, in CUDA_HOME or in /usr/local/cuda. "
      "Put nvcc on the PATH or set CUDACXX.")
  endif()
  message(STATUS "Ballast: no CUDA compiler found, building for CPUs only")
  return()
endif()

execute_process(COMMAND ${CMAKE_CUDA_COMPILER} --version OUTPUT_VARIABLE nvcc_says ERROR_QUIET)
if(nvcc_says MATCHES "release ([0-9.]+)" AND CMAKE_MATCH_1 VERSION_LESS 12.8)
  ballast_leave_cuda_out("${CMAKE_CUDA_COMPILER} is of CUDA ${CMAKE_MATCH_1}, and Ballast needs CUDA 12.8 or newer. "
    "Put a newer nvcc on the PATH or set CUDACXX.")
endif()

enable_language(CUDA)
find_package(CUDAToolkit REQUIRED)
set(BALLAST_HAS_CUDA ON)
# CUDA's runtime is installed with the libraries, so that the projects that use them need no toolkit.
set(BALLAST_CUDART $<BUILD_INTERFACE:CUDA::cudart_static>
  $<INSTALL_INTERFACE:$<INSTALL_PREFIX>/lib/ballast/libcudart_static.a> $<INSTALL_INTERFACE:rt> ${CMAKE_DL_LIBS})

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

# NCCL and cuBLAS are loaded, not linked: what is built here looks for them where they were found. What is installed does not.
if(BALLAST_HAS_CUDA)
  include(nvidia_packages)
  ballast_find_nccl()
  ballast_find_cublas()
  foreach(library IN ITEMS nccl cublas)
    if(TARGET nvidia::${library})
      cmake_path(GET BALLAST_${library}_LIBRARY PARENT_PATH folder)
      list(APPEND CMAKE_BUILD_RPATH ${folder})
    endif()
  endforeach()
endif()
