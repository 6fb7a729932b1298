//! libtest
