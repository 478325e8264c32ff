// Included before every file of a wheel's libraries. It names functions as the oldest system that the wheel serves has them,
// so that a newer system can compile for it. glibc 2.34 moved functions into another library, and gave them a new version.
// GCC 11 made two members of string streams anew; their older forms take their arguments in the same registers.

#ifdef __x86_64__
#define FIRST "@GLIBC_2.2.5\n"
#else
#define FIRST "@GLIBC_2.17\n"
#endif
#define BUFFER "St7__cxx1115basic_stringbufIcSt11char_traitsIcESaIcEE3strEv"
#define STREAM "_ZNSt7__cxx1119basic_istringstreamIcSt11char_traitsIcESaIcEEC1"
#define MODE "NS_12basic_stringIcS2_S3_EESt13_Ios_Openmode"

// clang-format off
asm(".symver dlopen, dlopen" FIRST
    ".symver dlsym, dlsym" FIRST
    ".symver dlerror, dlerror" FIRST
    ".symver exp, exp" FIRST
    ".symver log, log" FIRST
    ".symver pthread_rwlock_rdlock, pthread_rwlock_rdlock" FIRST
    ".symver pthread_rwlock_wrlock, pthread_rwlock_wrlock" FIRST
    ".symver pthread_rwlock_unlock, pthread_rwlock_unlock" FIRST
    ".symver _ZNKR" BUFFER ", _ZNK" BUFFER "@GLIBCXX_3.4.21\n"
    ".symver " STREAM "EO" MODE ", " STREAM "ERK" MODE "@GLIBCXX_3.4.21\n");
// clang-format on

// glibc 2.32 has this variable. With it, shared pointers count without atomics while a process has one thread.
extern "C" {
__attribute__((weak, visibility("hidden"))) char __libc_single_threaded = 0;
}

#undef FIRST
#undef BUFFER
#undef STREAM
#undef MODE
