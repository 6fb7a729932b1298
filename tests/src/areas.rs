//! areas
